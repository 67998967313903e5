"""The part of a response that a rule reads: not the tokens that an engine ends it with, and not the reasoning."""

from __future__ import annotations

import re

__all__ = ["final_answer", "without_end_tokens"]

_END_TOKEN = re.compile(r"(?:<[|｜][\w▁-]{2,40}[|｜]>|</s>|<(?:eos|pad|end_of_turn)>|\[EO[ST]\]|\[e~\[)\Z")
_LONGEST = 48
"""Characters: the end of the text that is looked at, so that a long response is not searched for every token."""


def without_end_tokens(text: str) -> str:
    """Return ``text`` without the special tokens at its end, as engines keep them without ``skip_special_tokens``.

    These are ``<|im_end|>``, ``<|endoftext|>``, ``</s>``, ``<|eot_id|>`` and their like, any number of them.
    """
    end = len(text)
    while True:
        last = len(text[:end].rstrip())
        found = _END_TOKEN.search(text[max(0, last - _LONGEST) : last])
        if found is None:
            return text[:end]
        end = last - len(found[0])


def final_answer(response: str) -> str:
    """Return what follows the reasoning: the text after the last ``</think>``, without end tokens.

    Of a response without ``</think>`` that is all of it, except reasoning that began with ``<think>`` and has no end.
    """
    _, closed, answer = without_end_tokens(response).rpartition("</think>")
    answer = answer.partition("<think>")[0]
    return answer.lstrip("\r\n") if closed else answer
