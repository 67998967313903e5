"""Prompts that keep the model's own tokens where the chat template writes its answers otherwise.

A template writes the JSON of calls with other spaces than the model did, or trims its text. The prompt that continues
from an answer is then the tokens that the engine saw and made, followed by what the template writes after that answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from slime.agent.same_answer import says
from slime.agent.trajectory import MessageNode

RENDERING = "rendering"
"""The entry of an answer's metadata that has the ``Rendering`` of its prompt."""


@dataclass(frozen=True)
class Rendering:
    """A prompt as the template wrote it: how many ids it has up to its last special one, which is ``begin``, their
    digest, and the ids after them, which begin the answer."""

    fixed: int
    digest: bytes
    begin: int
    opening: array[int]

    @classmethod
    def of(cls, ids: Sequence[int], special: Collection[int]) -> Rendering | None:
        """None for a template that writes no special token."""
        fixed = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in special), 0)
        if not fixed:
            return None
        return cls(fixed, _digest(array("i", ids[:fixed])), ids[fixed - 1], array("i", ids[fixed:]))

    def begins(self, ids: array[int]) -> bool:
        """Return True if the template has written a longer conversation with the same beginning."""
        return len(ids) > self.fixed and _digest(ids[: self.fixed]) == self.digest

    def answer_start(self, ids: Sequence[int]) -> int:
        """Return where an answer begins in ``ids``; its first characters may have changed the last tokens here."""
        after = zip(self.opening, ids[self.fixed : self.fixed + len(self.opening)], strict=False)
        return self.fixed + next((i for i, (a, b) in enumerate(after) if a != b), len(self.opening))


def with_own_tokens(
    ids: Sequence[int],
    answers: Sequence[MessageNode],
    special: Collection[int],
    eos: int | None,
    decode: Callable[[Sequence[int]], str],
) -> list[int]:
    """The prompt ``ids`` of the template with the tokens of the latest of ``answers`` that it has left what it said."""
    held = array("i", ids)
    for answer in reversed(answers):
        turn, rendering = answer.turn, answer.metadata.get(RENDERING)
        if turn is None or rendering is None or not rendering.begins(held):
            continue
        ended = len(turn.output_ids) > 0 and turn.output_ids[-1] in special
        end = turn.output_ids[-1] if ended else eos
        if end is None or end not in held[rendering.fixed :]:
            continue  # the template ends answers otherwise
        place = held.index(end, rendering.fixed)
        if rendering.begin in held[rendering.fixed : place] and rendering.begin != end:
            continue  # that is the end of another message
        if says(decode(held[rendering.answer_start(held) : place]), answer.message):
            return [*turn.prompt_ids, *turn.output_ids, *held[place + ended :]]
    return list(ids)


def _digest(ids: array[int]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
