"""Tool calls that a model began and that cannot be read, beside others that can.

SGLang's parsers pass over them in silence, and some read a call that was cut as far as it goes.
"""

from __future__ import annotations

import re

_BEGINS = (
    "<tool_call>", "<function=", "<function name=", "<invoke name=", "<|tool_call>", "<|tool_call_begin|>",
    "<｜tool_call_begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜invoke ", "<ifm|tool_call>",
)  # fmt: skip
"""The beginnings of one call, of the formats that mark calls."""
_PAIRS = (
    ("<function=", "</function>"), ("<function name=", "</function>"), ("<invoke name=", "</invoke>"),
    ("<parameter=", "</parameter>"), ("<parameter name=", "</parameter>"), ("<param name=", "</param>"),
    ("<arg_value>", "</arg_value>"), ("<ifm|arg_value>", "</ifm|arg_value>"),
    ("<steptml:parameter ", "</steptml:parameter>"), ("<｜DSML｜parameter ", "</｜DSML｜parameter>"),
)  # fmt: skip
"""The parts of a call: begin and end."""
_PYTHON_TAG = "<|python_tag|>"
_NEXT_JSON = re.compile(r";\s*\{")
"""Between the calls of Llama 3, which marks only the first."""


def suspicious_start(body: str, calls: int) -> int | None:
    """Return where the last call of ``body`` begins, if more were begun than the ``calls`` that were read, or one was
    cut; else where the part of a marker at its end does; None if it has no such part."""
    begins = [body.rfind(begin) for begin in _BEGINS if begin in body]
    begun = max(body.count(begin) for begin in _BEGINS)
    if body.startswith(_PYTHON_TAG):
        begins = [match.start() for match in _NEXT_JSON.finditer(body)]
        begun = 1 + len(begins)
    uneven = any(begin in body and body.count(begin) != body.count(end) for begin, end in _PAIRS)
    if begins and (begun > calls or uneven):
        last = max(begins)
        return last if body[last] == ";" else min(place for place in begins if "</" not in body[place:last])
    partial = _begun_marker(body)
    return len(body) - partial if partial else None


def _begun_marker(body: str) -> int:
    """The length of the longest part of a marker that ``body`` ends with."""
    lengths = [length for begin in _BEGINS for length in range(1, len(begin)) if body.endswith(begin[:length])]
    return max(lengths, default=0)


def is_cut(call: str) -> bool:
    """Return True if a part of the call that ``call`` begins with does not end."""
    return any(call.count(begin) > call.count(end) for begin, end in _PAIRS)
