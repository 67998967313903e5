"""Sampling parameters of a turn: what the gateway needs, the session's defaults, what the request sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slime.agent.adapters.errors import bad_request

BASE_SAMPLING_PARAMS: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}


def sampling_params(
    defaults: Mapping[str, Any], body: Mapping[str, Any], *, stop_keys: Iterable[str], max_tokens_keys: Iterable[str]
) -> dict[str, Any]:
    """The parameters for the engine. A request may ask for fewer tokens than the session's default, not for more."""
    params = {**BASE_SAMPLING_PARAMS, **defaults}
    for key in ("temperature", "top_p", "top_k"):
        if body.get(key) is not None:
            params[key] = body[key]
    _, stop = _first(body, stop_keys)
    if stop:
        params["stop"] = stop
    key, limit = _first(body, max_tokens_keys)
    if limit is None:
        return params
    if not isinstance(limit, int) or limit < 1:
        raise bad_request(f"{key} must be a whole number from 1 up, not {limit!r}")
    default = defaults.get("max_new_tokens")
    params["max_new_tokens"] = limit if default is None else min(limit, default)
    return params


def _first(body: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, Any]:
    return next(((key, body[key]) for key in keys if body.get(key) is not None), ("", None))
