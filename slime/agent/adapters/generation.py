"""One turn on the engine: its sampling parameters, and the replies, several when it was aborted and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.agent.adapters.http_requests import bad_request
from slime.agent.adapters.sampling_checks import check_request
from slime.agent.trajectory import TurnRecord
from slime.servers.engine_replies import output_tokens
from slime.utils.sampling import limited

BASE_SAMPLING_PARAMS: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
_COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens")


def sampling_params(
    defaults: Mapping[str, Any], body: Mapping[str, Any], *, stop_keys: Iterable[str], max_tokens_keys: Iterable[str]
) -> dict[str, Any]:
    """The parameters for the engine. A request may ask for fewer tokens than the session's default, not for more.

    Raises Refusal, with the field, for what is no such parameter.
    """
    try:
        check_request(body)
    except ValueError as e:
        raise bad_request(str(e)) from None
    params = {**BASE_SAMPLING_PARAMS, **defaults}
    for key in ("temperature", "top_p", "top_k"):
        if body.get(key) is not None:
            params[key] = body[key]
    _, stop = _first(body, stop_keys)
    if stop:
        params["stop"] = stop
    _, limit = _first(body, max_tokens_keys)
    if limit is None:
        return params
    default = defaults.get("max_new_tokens")
    params["max_new_tokens"] = limit if default is None else min(limit, default)
    return params


def _first(body: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, Any]:
    return next(((key, body[key]) for key in keys if body.get(key) is not None), ("", None))


@dataclass(frozen=True)
class Generated:
    """The parts of one reply that are kept."""

    output_ids: list[int]
    log_probs: list[float]
    meta_info: Mapping[str, Any]


def generated(reply: dict[str, Any]) -> Generated:
    """Take an engine's reply. Raises RuntimeError for one that lacks a field."""
    entries = output_tokens(reply)
    return Generated([entry[1] for entry in entries], [float(entry[0]) for entry in entries], reply["meta_info"])


class Replies:
    """The tokens of a turn as they come."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.tokens = list(prompt_ids)
        self.log_probs: list[float] = []
        self.spans: list[dict[str, Any]] = []
        self.meta_info: dict[str, Any] = {}
        self.finish_reason = ""

    @property
    def output_length(self) -> int:
        return len(self.log_probs)

    def add(self, reply: Generated) -> int:
        """Append a reply; return the number of its tokens."""
        reason = reply.meta_info.get("finish_reason")
        self.finish_reason = str(reason.get("type") if isinstance(reason, Mapping) else reason)
        self._add_versions(reply)
        for name in _COUNTED:
            self.meta_info[name] = self.meta_info.get(name, 0) + (reply.meta_info.get(name) or 0)
        self.tokens += reply.output_ids
        self.log_probs += reply.log_probs
        return len(reply.output_ids)

    def _add_versions(self, reply: Generated) -> None:
        version = reply.meta_info.get("weight_version")
        if version is None:
            return
        self.meta_info["weight_version"] = version
        spans = reply.meta_info.get("weight_versions") or []
        begun = len(self.log_probs)
        self.spans += [{**span, "start": begun + span["start"]} for span in spans] or [
            {"version": version, "start": begun}
        ]
        if spans or begun:
            self.meta_info["weight_versions"] = self.spans

    def turn(self) -> TurnRecord:
        """The turn that they are. One that was aborted where its limit was has reached its limit."""
        finish = "length" if self.finish_reason == "abort" else self.finish_reason
        meta_info = {**self.meta_info, "finish_reason": {"type": finish}}
        return TurnRecord(
            self.prompt_ids, self.tokens[len(self.prompt_ids) :], finish, self.log_probs, False, meta_info
        )


def left_of(params: Mapping[str, Any], replies: Replies) -> dict[str, Any]:
    """The sampling parameters for the rest of the turn."""
    return limited(params, params["max_new_tokens"] - replies.output_length, replies.output_length)
