"""The turns of a session as a tree of messages, the prompts that continue them, and the samples of its paths.

An agent sends the whole conversation with every request. Requests that begin with the same messages share the nodes of
those messages; an agent that edits its history, or runs sub-agents under the same session, branches the tree.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.agent.same_answer import joined, likeness, says
from slime.agent.turn_experts import TurnExperts
from slime.utils.misc import to_int32_tensor
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FORK_THRESHOLD_TOKENS = 1024
RENDERING = "rendering"
"""The entry of an answer's metadata that has the ``Rendering`` of its prompt."""


@dataclass(frozen=True)
class TurnRecord:
    """One request to the engine: the ids it saw, the ids it made, their log-probs, and how it ended.

    ``finish_reason`` is ``stop``, ``length`` or ``tool_calls``; ``output_log_probs`` has one entry per output token, or
    none where the engine gave none; ``ill_formed``: a tool call could not be parsed; ``meta_info`` is the
    engine's, from which samples get weight versions and cache counters. ``images`` are those of the prompt, each with
    one placeholder in it. ``experts`` are those of all tokens but the last, placeholders as the engine expands them.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    finish_reason: str
    output_log_probs: Sequence[float] = field(default_factory=list)
    ill_formed: bool = False
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[str] = ()
    experts: TurnExperts | None = None

    def compact(self) -> TurnRecord:
        """The turn with arrays for lists: each holds its whole prompt, and a list of ints is nine times as large."""
        return replace(
            self,
            prompt_ids=array("i", self.prompt_ids),
            output_ids=array("i", self.output_ids),
            output_log_probs=array("d", self.output_log_probs),
        )

    @property
    def at_limit(self) -> bool:
        """True if the limit of tokens ended it; ``finish_reason`` does not show it where it used a tool before."""
        reason = self.meta_info.get("finish_reason")
        return "length" in (self.finish_reason, reason.get("type") if isinstance(reason, Mapping) else reason)

    def standing_in(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of the output a later ``prompt``, compact as this turn, repeats in their place; -1
        when it departs before them."""
        same = _common_prefix_len(self.prompt_ids, prompt)
        if same < len(self.prompt_ids):
            return -1
        return _common_prefix_len(self.output_ids, prompt[same : same + len(self.output_ids)])

    def cut(self, length: int) -> TurnRecord | None:
        """The turn with the first ``length`` tokens of its output; None without any."""
        if not length:
            return None
        return replace(self, output_ids=self.output_ids[:length], output_log_probs=self.output_log_probs[:length])


@dataclass(eq=False)
class MessageNode:
    """A message and what followed it. ``turn`` is set on answers of the engine that may be trained on, ``turn_index``
    (from 0, as they were recorded) also on those that were given up. ``displaced`` is the engine's answer where the
    message is the agent's version of it; ``turn`` then ends where the two part."""

    role: str
    message: dict[str, Any]
    turn: TurnRecord | None = None
    turn_index: int | None = None
    children: list[MessageNode] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    displaced: MessageNode | None = None

    def child_of(self, message: Mapping[str, Any], prompt: Sequence[int] = ()) -> MessageNode | None:
        """The child that holds an equal message, or held it before the agent's version displaced it: of several the
        one whose tokens ``prompt`` repeats most of, and the first of those."""
        kept = [child.displaced for child in self.children if child.displaced is not None]
        role = message.get("role", "")
        equal = [child for child in (*self.children, *kept) if child.role == role and child.message == message]
        if len(equal) > 1:
            equal.sort(key=lambda child: child.turn.standing_in(prompt) if child.turn else -1, reverse=True)
        if equal and equal[0] in kept:
            self._take_back(equal[0])
        return equal[0] if equal else None

    def add(self, message: Mapping[str, Any]) -> MessageNode:
        """Append ``message`` and return its node."""
        self.children.append(MessageNode(message.get("role", ""), dict(message)))
        return self.children[-1]

    def displace(self, answer: MessageNode, message: Mapping[str, Any], standing: int) -> MessageNode:
        """Put the agent's version in the place of a child that is an answer, of which ``standing`` tokens stay."""
        assert answer.turn is not None
        version = MessageNode(answer.role, dict(message), answer.turn.cut(standing), answer.turn_index)
        version.displaced = answer
        version.metadata["merged_rewrite"] = {
            "abandoned_turn_index": answer.turn_index,
            "abandoned_response_tokens": len(answer.turn.output_ids) - standing,
        }
        self.children[self.children.index(answer)] = version
        return version

    def _take_back(self, answer: MessageNode) -> None:
        """Make a displaced answer a child again: the agent continued from it after all."""
        version = next(child for child in self.children if child.displaced is answer)
        version.displaced = version.turn = None
        del version.metadata["merged_rewrite"]
        self.children.append(answer)


class TrajectoryManager:
    """One message tree per session id. Thread-safe.

    ``fork_threshold_tokens`` (default 1024): as many generated tokens are given up, less one, where an answer continues
    otherwise in a later prompt, so that one sample continues instead of two with the same beginning; 0 or less: none.
    """

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        self.fork_threshold_tokens = FORK_THRESHOLD_TOKENS if fork_threshold_tokens is None else fork_threshold_tokens
        self._roots: dict[str, MessageNode] = {}
        self._turns: dict[str, int] = {}
        self._log_probs: dict[str, bool] = {}
        self._with_experts: dict[str, list[TurnRecord]] = {}
        self._lock = threading.Lock()

    def has_session(self, sid: str) -> bool:
        """Return True if a turn of ``sid`` is held."""
        return sid in self._roots

    def turn_count(self, sid: str) -> int:
        """The number of turns recorded for ``sid``."""
        return self._turns.get(sid, 0)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Mapping[str, Any]],
        response_message: Mapping[str, Any] | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Mount a turn: its prompt below the messages that exist already, its answer as a new leaf.

        An answer without a message is an empty one. A turn without messages is skipped with a warning. Raises
        AssertionError when the log-probs are not one per output token, unless no turn of the session has any: its
        samples have none then.
        """
        if not prompt_messages:
            logger.warning("session %r: a turn without prompt messages is not recorded", sid)
            return
        with self._lock:
            self._check_log_probs(sid, turn)
            root = self._roots.setdefault(sid, MessageNode("", {}))
            turn = turn.compact()
            if turn.experts is not None:
                turn = self._with_first_experts(sid, turn, turn.experts)
            said = {"role": "assistant", "content": ""} if response_message is None else response_message
            leaf = self._mount(sid, root, prompt_messages, turn).add(said)
            leaf.turn, leaf.turn_index = turn, self._turns.get(sid, 0)
            leaf.metadata.update(metadata or {})
            self._turns[sid] = leaf.turn_index + 1

    def follow(self, sid: str, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MessageNode]]:
        """Return ``messages`` with the engine's answers as they were given where they are lossy forms of those, and the
        nodes of the first ones, those that are held."""
        with self._lock:
            node, held, known = self._roots.get(sid), 0, list[MessageNode]()
            while node is not None and held < len(messages):
                node, count = _recognized(node, messages, held)
                known += [node] if node is not None else []
                held += count
        return [*(one.message for one in known), *messages[held:]], known

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
        placeholders: Placeholders | None = None,
    ) -> list[Sample]:
        """Return the samples of session ``sid`` and forget it; an unknown session has none.

        Every sample has the prompt, label and indices of ``base_sample``, the whole ``reward``, and in its metadata
        the flags of ``flags_of_path``; its attribute ``agent_session`` has counts of the whole session. With
        ``max_sample_tokens`` it is cut there, and ``truncated``; what then has no trained token is left out. With
        ``placeholders`` the tokens of images are expanded, which are in ``multimodal_inputs`` as their turns have them.
        """
        with self._lock:
            root = self._forget(sid)
        trained: dict[MessageNode, int] = {}
        samples: list[Sample] = []
        conversations: set[MessageNode] = set()
        for path in _paths(root) if root is not None else ():
            flags = flags_of_path(path)
            for sequence in sequences_of_path(path, trained, self.fork_threshold_tokens):
                sample = sample_of(sequence, base_sample, flags, max_sample_tokens, placeholders)
                if sample is None:
                    continue
                sample.reward = reward
                sample.metadata = {**(extra_metadata or {}), **sample.metadata}
                samples.append(sample)
                conversations.add(path[0])
        generated = _generated_tokens(root) if root is not None else 0
        counts = {
            "session": sid,
            "generated_tokens": generated,
            "trained_tokens": sum(sample.effective_response_length for sample in samples),
            "realign_tokens": generated - sum(trained.values()),
            "forks": len(samples) - len(conversations),
        }
        for sample in samples:
            sample.agent_session = counts  # type: ignore[attr-defined]  # a further attribute, for agent/* metrics
        return samples

    def drop_session(self, sid: str) -> None:
        """Forget session ``sid``."""
        with self._lock:
            self._forget(sid)

    def _with_first_experts(self, sid: str, turn: TurnRecord, own: TurnExperts) -> TurnRecord:
        """``turn`` with the experts of the earlier turn that most of its prompt was read in, for what both read."""
        earlier, start, before = self._with_experts.setdefault(sid, []), 0, own
        for one in earlier:
            length, experts = len(one.prompt_ids), one.experts
            same = _common_prefix_len(one.prompt_ids, turn.prompt_ids)
            if experts is None or (same < length and one.images):  # how many tokens the images there are is not known
                continue
            if same == length:
                same += _common_prefix_len(one.output_ids, turn.prompt_ids[same : same + len(one.output_ids)])
            of_images = experts.length + 1 - length - len(one.output_ids)
            if min(same + of_images, experts.length) > start:
                start, before = min(same + of_images, experts.length), experts
        turn = replace(turn, experts=own.after(start, before) if start else own)
        earlier.append(turn)
        return turn

    def _forget(self, sid: str) -> MessageNode | None:
        self._turns.pop(sid, None)
        self._log_probs.pop(sid, None)
        self._with_experts.pop(sid, None)
        return self._roots.pop(sid, None)

    def _check_log_probs(self, sid: str, turn: TurnRecord) -> None:
        outputs, log_probs = len(turn.output_ids), len(turn.output_log_probs)
        assert log_probs in (outputs, 0), f"session {sid!r}: {outputs} output tokens but {log_probs} log-probs"
        if outputs:
            earlier = self._log_probs.setdefault(sid, log_probs > 0)
            assert earlier == (log_probs > 0), (
                f"session {sid!r}: a turn {'without' if earlier else 'with'} log-probs after turns "
                f"{'with' if earlier else 'without'} them; all turns of a session must have them, or none"
            )

    def _mount(
        self, sid: str, root: MessageNode, messages: Sequence[Mapping[str, Any]], turn: TurnRecord
    ) -> MessageNode:
        """Walk down the existing messages, add the others, return the last one's node.

        A ``turn`` without output displaces no answer: it is in no sample for which tokens could be given up.
        """
        node, held = root, 0
        while held < len(messages) and (known := node.child_of(messages[held], turn.prompt_ids)) is not None:
            node, held = known, held + 1
        rest = messages[held:]
        answer = self._sole_answer(sid, node, rest[0]) if rest and len(turn.output_ids) else None
        if answer is not None and answer.turn is not None:
            standing = answer.turn.standing_in(turn.prompt_ids)
            if len(answer.turn.output_ids) - standing < self.fork_threshold_tokens and standing >= 0:
                node, rest = node.displace(answer, rest[0], standing), rest[1:]
        for message in rest:
            node = node.add(message)
        return node

    def _sole_answer(self, sid: str, node: MessageNode, message: Mapping[str, Any]) -> MessageNode | None:
        """The answer below ``node`` that ``message`` is the agent's own version of, where nothing followed it yet."""
        if message.get("role") != "assistant" or self.fork_threshold_tokens <= 0:
            return None
        answers = [child for child in node.children if child.role == "assistant"]
        if len(answers) > 1:
            logger.warning(
                "session %r: the agent changed an answer, and %d answers were given there: the conversation forks",
                sid,
                len(answers),
            )
        return answers[0] if len(answers) == 1 and not answers[0].children and not answers[0].displaced else None


def _recognized(node: MessageNode, messages: Sequence[Mapping[str, Any]], held: int) -> tuple[MessageNode | None, int]:
    """The child that the message at ``held`` is, and how many messages it is, those of an answer that came in parts."""
    if messages[held].get("role") != "assistant":
        found = node.child_of(messages[held])
        return found, int(found is not None)
    answers = [one for child in node.children for one in (child, child.displaced) if one and one.role == "assistant"]
    run = next((i for i, m in enumerate(messages[held:]) if m.get("role") != "assistant"), len(messages) - held)
    for count in range(run, 0, -1):
        theirs = joined(messages[held : held + count])
        forms = [(likeness(theirs, one.message), place) for place, one in enumerate(answers)]
        best = max((form for form in forms if form[0]), default=None)
        if best is not None:
            return answers[best[1]], count
    return None, 0


def _paths(root: MessageNode) -> Iterator[list[MessageNode]]:
    """The nodes from the first message to each leaf, leaves in the order in which their branches began."""
    pending: list[list[MessageNode]] = [[child] for child in reversed(root.children)]
    while pending:
        path = pending.pop()
        children = path[-1].children
        if not children:
            yield path
        pending.extend([*path, child] for child in reversed(children))


def _generated_tokens(root: MessageNode) -> int:
    """Return how many tokens the engine generated, with those that were given up."""
    generated, pending = 0, [root]
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        turn = (node.displaced or node).turn
        generated += len(turn.output_ids) if turn is not None else 0
    return generated


# Prompts that keep the model's own tokens where the chat template writes its answers otherwise: the JSON of calls with
# other spaces than the model did, trimmed text. The prompt that continues from an answer is then the tokens that the
# engine saw and made, followed by what the template writes after that answer.


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


# The turns of one path, packed into as few token sequences as reproduce what the engine saw.
#
# Each turn's prompt is compared with the tokens held so far:
# * CLEAN: they are its beginning. The rest of the prompt (tool output, templates) is appended as context.
# * REALIGN: it departs within the latest answer, and few tokens of that answer come after. They give way to the
#   prompt's, as context; those before were sampled in just this context, and stay.
# * FORK: anything else. A new sequence begins with this prompt.


@dataclass
class Segment:
    """Tokens ``start`` to ``end`` of a sequence; context unless they are those of the output of ``trained`` from
    ``offset`` on."""

    start: int
    end: int
    trained: TurnRecord | None = None
    offset: int = 0


@dataclass
class TokenSequence:
    """``tokens`` begin with the first prompt; ``segments`` are everything after it, in order. ``trained`` counts, of
    every answer, the tokens that some sequence trains on, which are its first ones."""

    tokens: array[int]
    prompt_length: int
    trained: dict[MessageNode, int]
    segments: list[Segment] = field(default_factory=list)
    answer_start: int = 0
    latest: MessageNode | None = None
    images: Sequence[str] = ()

    @classmethod
    def beginning_with(cls, prompt: Sequence[int], trained: dict[MessageNode, int]) -> TokenSequence:
        return cls(array("i", prompt), len(prompt), trained)

    def append(self, tokens: Sequence[int], trained: TurnRecord | None = None, offset: int = 0) -> None:
        if len(tokens):
            start = len(self.tokens)
            self.tokens.extend(tokens)
            self.segments.append(Segment(start, len(self.tokens), trained, offset))

    def append_answer(self, node: MessageNode, turn: TurnRecord) -> None:
        """Append the output of ``turn``, as context as far as another sequence trains on it."""
        self.answer_start, self.latest = len(self.tokens), node
        done = self.trained.get(node, 0)
        self.append(turn.output_ids[:done])
        self.append(turn.output_ids[done:], turn, done)
        self.trained[node] = len(turn.output_ids)

    def take_prompt(self, turn: TurnRecord, threshold: int) -> bool:
        """Make the turn's prompt the tokens held; False when a new sequence must begin with it."""
        same = _common_prefix_len(self.tokens, turn.prompt_ids)
        if same < len(self.tokens):
            if same < self.answer_start or self.latest is None:
                return False
            last = self.segments[-1]
            given_up = last.end - max(last.start, same) if last.trained else 0
            if given_up and given_up >= threshold:
                return False
            self.trained[self.latest] -= given_up
            del self.tokens[same:]
            self.segments = [segment for segment in self.segments if segment.start < same]
            for segment in self.segments:
                segment.end = min(segment.end, same)
        self.append(turn.prompt_ids[len(self.tokens) :])
        return True


def sequences_of_path(
    path: Iterable[MessageNode], trained: dict[MessageNode, int], threshold: int
) -> list[TokenSequence]:
    """Pack the turns of ``path``. ``trained`` holds how many tokens of an answer earlier paths train on, which are
    context here; the others are added to it. Turns without output (the context was full) add nothing to a sequence."""
    sequences: list[TokenSequence] = []
    for node in path:
        turn = node.turn
        if turn is None:
            continue
        if sequences and not len(turn.output_ids):
            continue
        if not sequences or not sequences[-1].take_prompt(turn, threshold):
            sequences.append(TokenSequence.beginning_with(turn.prompt_ids, trained))
        sequences[-1].images = turn.images
        sequences[-1].append_answer(node, turn)
    return sequences


def flags_of_path(path: Iterable[MessageNode]) -> dict[str, bool]:
    """Return the flags of all samples of ``path``: its last turn was ``truncated``; any turn of it used a tool
    (``use_tool``) or was ``ill_formed``."""
    turns = [node.turn for node in path if node.turn is not None]
    return {
        "truncated": turns[-1].at_limit,
        "use_tool": any(turn.finish_reason == "tool_calls" for turn in turns),
        "ill_formed": any(turn.ill_formed for turn in turns),
    }


@dataclass(frozen=True)
class Placeholders:
    """The ``token`` that stands for an image, and how many of them each image is for a trainer."""

    token: int
    lengths: Mapping[str, int]

    def counts(self, sequence: TokenSequence) -> list[int]:
        """Return how many tokens each of ``sequence`` becomes. Raises ValueError where images are missing."""
        if sequence.tokens.count(self.token) != len(sequence.images):
            raise ValueError(
                f"{sequence.tokens.count(self.token)} places for {len(sequence.images)} images in a sample"
            )
        left = iter(sequence.images)
        return [self.lengths[next(left)] if token == self.token else 1 for token in sequence.tokens]


def sample_of(
    sequence: TokenSequence,
    base: Sample,
    flags: Mapping[str, bool],
    max_tokens: int = 0,
    placeholders: Placeholders | None = None,
) -> Sample | None:
    """Return the training sample of ``sequence`` with ``flags`` as metadata, cut at ``max_tokens`` when that is
    positive; None when no token of it is trained. It is TRUNCATED where it was cut, or its path was."""
    counts = [1] * len(sequence.tokens) if placeholders is None else placeholders.counts(sequence)
    ends = list(itertools.accumulate(counts))
    limit = bisect.bisect_right(ends, max_tokens) if max_tokens > 0 else len(ends)

    def expanded(start: int, end: int) -> list[int]:
        pairs = zip(sequence.tokens[start:end], counts[start:end], strict=True)
        return [token for token, count in pairs for _ in range(count)]

    segments = [segment for segment in sequence.segments if segment.start < limit]
    if not any(segment.trained for segment in segments):
        return None
    sample = Sample(
        index=base.index,
        group_index=base.group_index,
        rollout_id=base.index if base.rollout_id is None else base.rollout_id,
        prompt=base.prompt,
        label=base.label,
        tokens=expanded(0, sequence.prompt_length),
    )
    if placeholders is not None and (shown := sequence.tokens[:limit].count(placeholders.token)):
        sample.multimodal_inputs = {"images": list(sequence.images[:shown])}
    for segment in segments:
        tokens, turn = expanded(segment.start, min(segment.end, limit)), segment.trained
        if turn is None:
            sample.append_response_tokens(tokens=tokens, trainable=False)
            continue
        log_probs = list(turn.output_log_probs[segment.offset :][: len(tokens)])
        log_probs = log_probs or [0.0] * len(tokens)  # none: taken away at the end
        sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info=turn.meta_info or None)
    truncated = flags["truncated"] or limit < len(sequence.tokens)
    sample.status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
    if not any(segment.trained and len(segment.trained.output_log_probs) for segment in segments):
        sample.rollout_log_probs = None
    sample.metadata = {**flags, "truncated": truncated}
    if sequence.latest is not None and sequence.latest.turn is not None and sequence.latest.turn.experts is not None:
        # of the turn that it ends with, which read all of its tokens
        sample.rollout_routed_experts = to_int32_tensor(sequence.latest.turn.experts.first(len(sample.tokens) - 1))
    return sample


def _common_prefix_len(a: Sequence[int], b: Sequence[int], chunk: int = 4096) -> int:
    """The number of equal elements at the beginning of both, compared ``chunk`` at a time."""
    length = min(len(a), len(b))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return length
