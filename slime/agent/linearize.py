"""The turns of one conversation, packed into as few token sequences as reproduce what the engine saw.

Each turn's prompt is compared with the tokens held so far:

* CLEAN: they are its beginning. The rest of the prompt (tool output, templates) is appended as context.
* REALIGN: it departs within the latest answer, and the new answer is short. The template or the agent wrote that
  answer differently: its tokens give way to the prompt's, as context.
* FORK: anything else. A new sequence begins with this prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slime.agent.turns import MessageNode, TurnRecord
from slime.utils.types import Sample


@dataclass
class Segment:
    """Tokens ``start`` to ``end`` of a sequence; context unless they are the output of ``trained``."""

    start: int
    end: int
    trained: TurnRecord | None = None


@dataclass
class TokenSequence:
    """``tokens`` begin with the first prompt; ``segments`` are everything after it, in order."""

    tokens: array[int]
    prompt_length: int
    segments: list[Segment] = field(default_factory=list)
    answer_start: int = 0

    @classmethod
    def beginning_with(cls, prompt: Sequence[int]) -> TokenSequence:
        return cls(array("i", prompt), len(prompt))

    def append(self, tokens: Sequence[int], trained: TurnRecord | None = None) -> None:
        if len(tokens):
            start = len(self.tokens)
            self.tokens.extend(tokens)
            self.segments.append(Segment(start, len(self.tokens), trained))

    def append_answer(self, turn: TurnRecord, trainable: bool) -> None:
        self.answer_start = len(self.tokens)
        self.append(turn.output_ids, turn if trainable else None)

    def take_prompt(self, turn: TurnRecord, threshold: int) -> bool:
        """Make the turn's prompt the tokens held; False when a new sequence must begin with it."""
        same = _common_prefix_len(self.tokens, turn.prompt_ids)
        if same < len(self.tokens):
            if same < self.answer_start or len(turn.output_ids) >= threshold:
                return False
            del self.tokens[self.answer_start :]
            self.segments = [segment for segment in self.segments if segment.end <= self.answer_start]
        self.append(turn.prompt_ids[len(self.tokens) :])
        return True


def sequences_of_path(path: Iterable[MessageNode], trained: set[MessageNode], threshold: int) -> list[TokenSequence]:
    """Pack the turns of ``path``. Answers in ``trained`` belong to an earlier path and are context here; the others
    are added to it. Turns without output (the context was full) add nothing to a sequence."""
    sequences: list[TokenSequence] = []
    for node in path:
        turn = node.turn
        if turn is None:
            continue
        if sequences and not len(turn.output_ids):
            continue
        if not sequences or not sequences[-1].take_prompt(turn, threshold):
            sequences.append(TokenSequence.beginning_with(turn.prompt_ids))
        sequences[-1].append_answer(turn, trainable=node not in trained)
        trained.add(node)
    return sequences


def flags_of_path(path: Iterable[MessageNode]) -> dict[str, bool]:
    """What is said of all samples of ``path``: whether its last turn was ``truncated``, and whether any turn of it used
    a tool (``use_tool``) or was ``ill_formed``."""
    turns = [node.turn for node in path if node.turn is not None]
    return {
        "truncated": turns[-1].finish_reason == "length",
        "use_tool": any(turn.finish_reason == "tool_calls" for turn in turns),
        "ill_formed": any(turn.ill_formed for turn in turns),
    }


def sample_of(sequence: TokenSequence, base: Sample, flags: Mapping[str, bool], max_tokens: int = 0) -> Sample | None:
    """Return the training sample of ``sequence`` with ``flags`` as metadata, cut at ``max_tokens`` when that is
    positive; None when no token of it is trained."""
    limit = max_tokens if max_tokens > 0 else len(sequence.tokens)
    segments = [segment for segment in sequence.segments if segment.start < limit]
    if not any(segment.trained for segment in segments):
        return None
    sample = Sample(
        index=base.index,
        group_index=base.group_index,
        rollout_id=base.index if base.rollout_id is None else base.rollout_id,
        prompt=base.prompt,
        label=base.label,
        tokens=sequence.tokens[: sequence.prompt_length].tolist(),
    )
    for segment in segments:
        _append(sample, sequence.tokens[segment.start : min(segment.end, limit)].tolist(), segment.trained)
    sample.status = Sample.Status.COMPLETED
    if not any(segment.trained and len(segment.trained.output_log_probs) for segment in segments):
        sample.rollout_log_probs = None
    sample.metadata = {**flags, "truncated": flags["truncated"] or limit < len(sequence.tokens)}
    return sample


def _append(sample: Sample, tokens: list[int], turn: TurnRecord | None) -> None:
    if turn is None:
        sample.append_response_tokens(tokens=tokens, trainable=False)
        return
    log_probs = list(turn.output_log_probs[: len(tokens)]) or [0.0] * len(tokens)  # none: taken away at the end
    sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info=turn.meta_info or None)


def _common_prefix_len(a: Sequence[int], b: Sequence[int], chunk: int = 4096) -> int:
    """The number of equal elements at the beginning of both, compared ``chunk`` at a time."""
    length = min(len(a), len(b))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return length
