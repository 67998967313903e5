"""What is kept of a session: its turns, and the messages between which they happened."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class TurnRecord:
    """One request to the engine: the ids it saw, the ids it made, their log-probs, and how it ended.

    ``finish_reason`` is ``stop``, ``length`` or ``tool_calls``; ``output_log_probs`` has one entry per output token, or
    none where the engine gave none; ``ill_formed`` says that a tool call could not be parsed; ``meta_info`` is the
    engine's, from which samples get weight versions and cache counters.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str
    output_log_probs: Sequence[float] = field(default_factory=list)
    ill_formed: bool = False
    meta_info: Mapping[str, Any] = field(default_factory=dict)

    def compact(self) -> TurnRecord:
        """The turn with arrays for lists: each holds its whole prompt, and a list of ints is nine times as large."""
        return replace(
            self,
            prompt_ids=array("i", self.prompt_ids),
            output_ids=array("i", self.output_ids),
            output_log_probs=array("d", self.output_log_probs),
        )


@dataclass(eq=False)
class MessageNode:
    """A message and what followed it. ``turn`` is set on answers of the engine that may be trained on, ``turn_index``
    (from 0, as they were recorded) also on those that were given up."""

    role: str
    message: dict[str, Any]
    turn: TurnRecord | None = None
    turn_index: int | None = None
    children: list[MessageNode] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    def child_of(self, message: Mapping[str, Any]) -> MessageNode | None:
        """The first child that holds an equal message."""
        role = message.get("role", "")
        return next((child for child in self.children if child.role == role and child.message == message), None)

    def add(self, message: Mapping[str, Any]) -> MessageNode:
        """Append ``message`` and return its node."""
        self.children.append(MessageNode(message.get("role", ""), dict(message)))
        return self.children[-1]

    def overwrite(self, message: Mapping[str, Any]) -> None:
        """Put the agent's version in the place of an answer, which is trained on no more."""
        assert self.turn is not None
        self.metadata["merged_rewrite"] = {
            "abandoned_turn_index": self.turn_index,
            "abandoned_response_tokens": len(self.turn.output_ids),
        }
        self.message, self.turn = dict(message), None
