"""Prompts of the model. ``memagent_prompts`` of ``--custom-config-path`` replaces either text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NO_MEMORY = "No previous memory"
PROMPTS = {
    "update": (
        "You are given a problem, a section of a document that may help to solve it, and the memory that you wrote of "
        "the sections before. Read the section carefully and write the memory again: keep everything in it that may be "
        "needed, and add what this section says about the problem.\n\n"
        "<problem>\n{problem}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\n<section>\n{section}\n</section>\n\n"
        "Updated memory:"
    ),
    "answer": (
        "You are given a problem, and the memory that you wrote while you read a document. Solve the problem with what "
        "the memory says, and put the answer in \\boxed{}.\n\n"
        "<problem>\n{problem}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\nYour answer:"
    ),
}
_SLOT = re.compile(r"\{(problem|memory|section)\}")


class TokenTemplate:
    """The token ids of a chat with one message of the user, with slots that are filled with token ids.

    So a memory stays the tokens that the model wrote: decoded and encoded again they might be others.
    """

    def __init__(self, tokenizer: Any, text: str, template_kwargs: Mapping[str, Any]) -> None:
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **template_kwargs)
        pieces = _SLOT.split(rendered)  # text, slot, text, ..., text
        self._texts = [tokenizer.encode(piece, add_special_tokens=False) if piece else [] for piece in pieces[::2]]
        self._slots = pieces[1::2]

    def fill(self, **slots: Sequence[int]) -> list[int]:
        """Return the ids of the prompt."""
        ids = list(self._texts[0])
        for name, text in zip(self._slots, self._texts[1:], strict=True):
            ids += [*slots[name], *text]
        return ids
