"""Checks of the replies to ``/generate`` requests, and the fields that they must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def output_tokens(reply: Mapping[str, Any], *, with_text: bool = False) -> list[Any]:
    """Return ``[log-prob, token id, ...]`` of each token that ``reply`` made.

    Raises RuntimeError naming the fields that it lacks. Only a reply that made nothing may lack the tokens: one that
    was aborted before it began, or says so itself.
    """
    meta_info = meta_of(reply)
    missing = ["text"] if with_text and not isinstance(reply.get("text"), str) else []
    missing += [] if "finish_reason" in meta_info else ["meta_info with finish_reason"]
    entries, made = meta_info.get("output_token_logprobs"), meta_info.get("completion_tokens")
    finish = meta_info.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    nothing = not reply.get("text") and not reply.get("output_ids") and not made
    unknown = entries is None or (not entries and not nothing)
    if unknown and not (nothing and (made == 0 or kind in ("abort", None))):
        missing.append("meta_info with output_token_logprobs")
    if missing:
        raise _lacks(", no ".join(missing), reply)
    try:
        whole = {type(entry[1]) for entry in entries or ()} <= {int}
    except (TypeError, LookupError):
        whole = False
    if not whole:
        raise _lacks("meta_info with output_token_logprobs of a log-prob and a token id each", reply)
    return list(entries or ())


def meta_of(reply: object) -> Mapping[str, Any]:
    """Return the ``meta_info`` of ``reply``. Raises RuntimeError when it has none."""
    meta_info = reply.get("meta_info") if isinstance(reply, Mapping) else None
    if not isinstance(meta_info, Mapping):
        raise _lacks("meta_info", reply)
    return meta_info


def _lacks(fields: str, reply: object) -> RuntimeError:
    return RuntimeError(f"the engine's reply has no {fields}: {str(reply)[:500]}")
