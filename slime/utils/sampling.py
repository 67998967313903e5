"""Sampling parameters of requests to the engines: limits of what is left, and seeds; and fields of replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any


def limited(params: Mapping[str, Any], left: int, made: int = 0) -> dict[str, Any]:
    """Return ``params`` for the rest of a response of which ``made`` tokens are there and ``left`` may follow.

    Both limits follow: engines refuse a ``min_new_tokens`` above ``max_new_tokens``.
    """
    found = {**params, "max_new_tokens": left}
    if found.get("min_new_tokens") is not None:
        found["min_new_tokens"] = max(0, min(int(found["min_new_tokens"]) - made, left))
    return found


def sampling_seed(*parts: object) -> int:
    """Return the seed, below 2^31, of a response that ``parts`` tell from all others: the same ones, the same seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def asked_fields(names: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a request for a reply with more than tokens and log-probs.

    Routers drop fields that they do not know, and pass on the labels, which the engine plugin reads.
    """
    labels = {f"slime_{name}": "true" for name in names}
    return {**dict.fromkeys(names, True), **({"custom_labels": labels} if names else {})}
