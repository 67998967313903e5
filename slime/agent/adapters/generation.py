"""One turn on the engine: its sampling parameters and their checks, and the replies, several when it was resumed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.agent.adapters.http_requests import bad_request
from slime.agent.trajectory import TurnRecord
from slime.agent.turn_experts import TurnExperts, rows_of_reply
from slime.arguments.args import Args
from slime.servers.engine_replies import output_tokens
from slime.utils.plain_numbers import is_integer, is_number
from slime.utils.sampling import limited

BASE_SAMPLING_PARAMS: dict[str, Any] = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "max_new_tokens": 4096,
}
_COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens")

INT32, INT64 = 2**31 - 1, 2**63 - 1
MOST_STOPS, LONGEST_STOP = 32, 1000
MOST_TOKEN_IDS = 1024
LONGEST_GRAMMAR = 1 << 20
HOTTEST = 100.0
_TOKEN_ID = re.compile(r"\d{1,10}")
Check = Callable[[Any], bool]


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
    """The tokens of a turn as they come, and their experts where ``replay`` is given; ``more`` tokens than
    ``prompt_ids`` are those of images."""

    def __init__(self, prompt_ids: list[int], replay: Args | None = None, more: int = 0) -> None:
        self.replay, self.more = replay, more
        self.experts: np.ndarray | None = None
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
        if self.replay is not None and reply.output_ids:
            rows = rows_of_reply(self.replay, reply.meta_info, len(self.tokens) + self.more - 1)
            # a turn that is resumed is read again from its start
            self.experts = rows if self.experts is None else np.concatenate([self.experts, rows[len(self.experts) :]])
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
        output = self.tokens[len(self.prompt_ids) :]
        experts = None if self.experts is None else TurnExperts(self.experts)
        return TurnRecord(self.prompt_ids, output, finish, self.log_probs, False, meta_info, experts=experts)


def left_of(params: Mapping[str, Any], replies: Replies) -> dict[str, Any]:
    """The sampling parameters for the rest of the turn."""
    return limited(params, params["max_new_tokens"] - replies.output_length, replies.output_length)


# Checks of the sampling parameters of agents and operators: only those that do the engine no harm are allowed. Its
# scheduler ends with all its requests on a number that does not fit its tensors.


def _number(low: float, high: float, *, above: bool = False) -> Check:
    return lambda value: is_number(value) and (low < value if above else low <= value) and value <= high


def _integer(low: int, high: int) -> Check:
    return lambda value: is_integer(value) and low <= value <= high


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_STOP
    return (
        isinstance(value, list)
        and len(value) <= MOST_STOPS
        and all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in value)
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MOST_TOKEN_IDS and all(map(_integer(0, INT32), value))


def _is_bias(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MOST_TOKEN_IDS
        and all(_TOKEN_ID.fullmatch(str(key)) and int(key) <= INT32 for key in value)
        and all(map(_number(-100, 100), value.values()))
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_grammar(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_GRAMMAR


_STOP = (_is_stop, f"a text, or at most {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters")
_BOOL = (_is_bool, "true or false")
_GRAMMAR = (_is_grammar, f"a text of at most {LONGEST_GRAMMAR} characters")
_LIMIT = (_integer(1, INT32), f"a whole number from 1 to {INT32}")
_SEED = (_integer(-INT64 - 1, INT64), "a whole number of 64 bits")

ASKED: dict[str, tuple[Check, str]] = {
    "temperature": (_number(0, HOTTEST), f"a number from 0 to {HOTTEST:g}"),
    "top_p": (_number(0, 1, above=True), "a number above 0, at most 1"),
    "top_k": (lambda value: value == -1 or _integer(1, INT32)(value), f"-1 or a whole number from 1 to {INT32}"),
    "min_p": (_number(0, 1), "a number from 0 to 1"),
    "frequency_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "presence_penalty": (_number(-2, 2), "a number from -2 to 2"),
    "repetition_penalty": (_number(0, 2, above=True), "a number above 0, at most 2"),
    "n": (_integer(1, 1), "1: a session is one conversation"),
    "seed": _SEED,
    "logit_bias": (_is_bias, f"an object of at most {MOST_TOKEN_IDS} token ids with numbers from -100 to 100"),
    "stop": _STOP,
    "stop_sequences": _STOP,
    "max_tokens": _LIMIT,
    "max_completion_tokens": _LIMIT,
    "max_output_tokens": _LIMIT,
}
"""The fields of requests, those too that the gateways do not pass on: what the check is, and what it wants."""

ENGINE: dict[str, tuple[Check, str]] = {
    **{name: check for name, check in ASKED.items() if not name.startswith(("seed", "stop_s", "max_"))},
    "max_new_tokens": _LIMIT,
    "min_new_tokens": (_integer(0, INT32), f"a whole number from 0 to {INT32}"),
    "sampling_seed": (_integer(0, INT64), f"a whole number from 0 to {INT64}"),
    "stop_regex": _STOP,
    "stop_token_ids": (_is_token_ids, f"at most {MOST_TOKEN_IDS} token ids"),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _BOOL),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _GRAMMAR),
    "custom_params": (lambda value: isinstance(value, dict), "an object"),
}
"""The parameters of the engine that a session may begin with."""


def check_request(body: Mapping[str, Any]) -> None:
    """Raise ValueError for a sampling parameter of a request that is not one. Null is not given."""
    for name, (is_right, wanted) in ASKED.items():
        if body.get(name) is not None and not is_right(body[name]):
            raise ValueError(f"{name} must be {wanted}, not {body[name]!r:.100}")


def check_defaults(params: Mapping[str, Any]) -> None:
    """Raise ValueError for ``sampling_params`` of a new session that the engine does not have, or does not take."""
    for name, value in params.items():
        if name not in ENGINE:
            raise ValueError(f"sampling_params.{name!s:.100} is unknown; known are {', '.join(sorted(ENGINE))}")
        is_right, wanted = ENGINE[name]
        if value is not None and not is_right(value):
            raise ValueError(f"sampling_params.{name} must be {wanted}, not {value!r:.100}")
    lowest, most = params.get("min_new_tokens"), params.get("max_new_tokens")
    if lowest is not None and most is not None and lowest > most:
        raise ValueError(f"sampling_params.min_new_tokens must be at most max_new_tokens ({most}), not {lowest}")
