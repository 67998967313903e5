"""The turns of a session as a tree of messages, and the training samples of its paths.

An agent sends the whole conversation with every request. Requests that begin with the same messages share the nodes of
those messages; an agent that edits its history, or runs sub-agents under the same session, branches the tree.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.agent.linearize import _common_prefix_len, flags_of_path, sample_of, sequences_of_path
from slime.agent.turns import MessageNode, TurnRecord
from slime.utils.types import Sample

__all__ = ["TrajectoryManager", "TurnRecord", "_common_prefix_len"]

logger = logging.getLogger(__name__)

FORK_THRESHOLD_TOKENS = 1024


class TrajectoryManager:
    """One message tree per session id. Thread-safe.

    ``fork_threshold_tokens`` (default 1024): answers shorter than this are given up when the agent rewrites them, so
    that one sample goes on instead of two beginning alike; 0 or less never gives any up.
    """

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        self.fork_threshold_tokens = FORK_THRESHOLD_TOKENS if fork_threshold_tokens is None else fork_threshold_tokens
        self._roots: dict[str, MessageNode] = {}
        self._turns: dict[str, int] = {}
        self._log_probs: dict[str, bool] = {}
        self._lock = threading.Lock()

    def has_session(self, sid: str) -> bool:
        """Whether a turn of ``sid`` is held."""
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
        response_message: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Mount a turn: its prompt below the messages that are there already, its answer as a new leaf.

        A turn without messages is skipped with a warning. Raises AssertionError when the log-probs are not one per
        output token, unless no turn of the session has any: its samples have none then.
        """
        if not prompt_messages:
            logger.warning("session %r: a turn without prompt messages is not recorded", sid)
            return
        with self._lock:
            self._check_log_probs(sid, turn)
            root = self._roots.setdefault(sid, MessageNode("", {}))
            leaf = self._mount(sid, root, prompt_messages).add(response_message)
            leaf.turn, leaf.turn_index = turn.compact(), self._turns.get(sid, 0)
            leaf.metadata.update(metadata or {})
            self._turns[sid] = leaf.turn_index + 1

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """Return the samples of session ``sid`` and forget it; an unknown session has none.

        Every sample has the prompt, label and indices of ``base_sample``, the whole ``reward``, and in its metadata
        the flags of ``flags_of_path``. With ``max_sample_tokens`` it is cut there, and ``truncated``; what then has no
        trained token is left out.
        """
        with self._lock:
            root = self._forget(sid)
        trained: set[MessageNode] = set()
        samples = []
        for path in _paths(root) if root is not None else ():
            flags = flags_of_path(path)
            for sequence in sequences_of_path(path, trained, self.fork_threshold_tokens):
                sample = sample_of(sequence, base_sample, flags, max_sample_tokens)
                if sample is None:
                    continue
                sample.reward = reward
                sample.metadata = {**(extra_metadata or {}), **sample.metadata}
                samples.append(sample)
        return samples

    def drop_session(self, sid: str) -> None:
        """Forget session ``sid``."""
        with self._lock:
            self._forget(sid)

    def _forget(self, sid: str) -> MessageNode | None:
        self._turns.pop(sid, None)
        self._log_probs.pop(sid, None)
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

    def _mount(self, sid: str, root: MessageNode, messages: Sequence[Mapping[str, Any]]) -> MessageNode:
        """Walk down the messages that are there, add the others, return the last one's node."""
        node, held = root, 0
        while held < len(messages) and (known := node.child_of(messages[held])) is not None:
            node, held = known, held + 1
        rest = messages[held:]
        if not rest:
            return node
        rewritten = self._rewritten_child(sid, node, rest[0])
        if rewritten is not None:
            rewritten.overwrite(rest[0])
            node, rest = rewritten, rest[1:]
        for message in rest:
            node = node.add(message)
        return node

    def _rewritten_child(self, sid: str, node: MessageNode, message: Mapping[str, Any]) -> MessageNode | None:
        """The short answer below ``node`` that ``message`` is the agent's own version of, if there is one."""
        if message.get("role") != "assistant" or self.fork_threshold_tokens <= 0:
            return None
        answers = [child for child in node.children if child.role == "assistant"]
        if len(answers) > 1:
            logger.warning(
                "session %r: the agent changed an answer, and %d answers were given there: the conversation forks",
                sid,
                len(answers),
            )
        if len(answers) != 1:
            return None
        answer = answers[0]
        short = answer.turn is not None and len(answer.turn.output_ids) < self.fork_threshold_tokens
        return answer if short and not answer.children else None


def _paths(root: MessageNode) -> Iterator[list[MessageNode]]:
    """The nodes from the first message to each leaf, leaves in the order in which their branches began."""
    pending: list[list[MessageNode]] = [[child] for child in reversed(root.children)]
    while pending:
        path = pending.pop()
        children = path[-1].children
        if not children:
            yield path
        pending.extend([*path, child] for child in reversed(children))
