"""Answers of engines that must not be trained on: who gave them, and how often."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

MOST_REJECTED = 6
"""So many answers to one request may be rejected."""
COMPLETE = frozenset({"stop", "length"})
Report = Callable[[str, str | None, str], None]


def wrong_with(answer: Any, oldest_version: int | None = None) -> str | None:
    """Return what is wrong with the answer to a ``/generate`` request for log-probs, None when nothing is.

    Every token needs a finite log-prob, and the engine the weights of ``oldest_version`` at least. An answer without
    ``meta_info`` is not of an engine, and is left to its reader.
    """
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        return None
    reported = meta.get("output_token_logprobs") or []
    log_probs = [item[0] for item in reported]
    among_kept = meta.get("output_token_sampling_logprobs") or []
    for name, values in (("log-prob", log_probs), ("log-prob among the kept tokens", among_kept)):
        if not _all_finite(values):
            index = next(i for i, value in enumerate(values) if not _all_finite([value]))
            return f"token {index} of {len(reported)} has the {name} {values[index]}"
    finish, made = meta.get("finish_reason"), meta.get("completion_tokens")
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    if kind in COMPLETE and isinstance(made, int) and len(reported) < made:
        return f"{len(reported)} log-probs came with {made} tokens"
    version = meta.get("weight_version")
    if oldest_version is not None and version is not None and finish is not None:
        number = str(version)
        if not number.isdecimal() or int(number) < oldest_version:
            return f"it was generated with weight version {number}, and version {oldest_version} was asked"
    return None


def _all_finite(values: list[Any]) -> bool:
    try:
        return math.isfinite(sum(values))  # one bad value makes the sum bad
    except TypeError:
        return False


class EngineAnswers:
    """The answers that were rejected, and the weights that engines must have.

    Attributes:
        oldest_version: router URL -> the version that all of its engines have had since the last push.
        report: called with the router's URL, the engine's (None: the router does not name it) and what is wrong.
        rejected: engine URL -> its answers that were rejected.
    """

    def __init__(self) -> None:
        self.oldest_version: dict[str, int] = {}
        self.report: Report | None = None
        self.rejected: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reject(self, router_url: str, engine_url: str | None, wrong: str) -> str:
        """Count an answer that is not used; return a sentence about it."""
        with self._lock:
            self.rejected[engine_url or router_url] += 1
        sentence = f"an answer of {engine_url or f'an engine behind {router_url}'} is rejected: {wrong}"
        if self.report is None:
            logger.warning("%s", sentence)
        else:
            self.report(router_url, engine_url, wrong)
        return sentence
