"""The age of tokens when they are trained on, in training steps.

A step is a rollout that has been trained on. The engines number their weights by versions; the driver reports after
every push which version holds the weights of which step (``WeightClock``). Rollout ``r`` is trained on weights of step
``r``, so its tokens of weights of step ``s`` lag by ``r - s``.

Where it is not certain which weights made a token, the oldest that can have made it count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.rollout.groups import copy_group
from slime.utils.types import Sample, iter_samples

UNKNOWN_WEIGHTS = -1
"""The step of weights that were never pushed: older than all."""


class WeightClock:
    """The training step that made each version of the engines' weights. Thread-safe.

    ``step`` is that of the newest version, None before the first push and in runs that push none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._version: str | None = None
        self._steps: dict[str, int] = {}
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def publish(self, version: int | str, step: int) -> None:
        """Note that every engine now holds ``version``, the weights after training on all rollouts before ``step``."""
        with self._lock:
            self._version, self.step = str(version), step
            self._steps[str(version)] = step
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def step_of(self, version: object) -> int | None:
        """Return the step of ``version``, None for one that was not published."""
        with self._lock:
            return self._steps.get(str(version))

    def least_step_of(self, version: object) -> int | None:
        """Return the step of ``version``, or the least it can have when it is not known; None before the first push.

        Engines hold a higher version a moment before the driver reports it: it is at least as new as the newest. Any
        other one was never pushed (an engine that lost its weights): ``UNKNOWN_WEIGHTS``.
        """
        with self._lock:
            newest, version = self._version, str(version)
            if newest is None or version in self._steps:
                return self._steps.get(version)
            newer = version.isdigit() and newest.isdigit() and int(version) > int(newest)
            return self.step if newer else UNKNOWN_WEIGHTS

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every ``publish``, on its thread; return what ends that."""
        with self._lock:
            self._listeners.append(listener)

        def forget() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return forget


_clock = WeightClock()


def weight_clock() -> WeightClock:
    """Return the process's clock."""
    return _clock


@dataclass(frozen=True)
class StalenessBound:
    """``--max-staleness``: no token is trained on that lags by more than ``limit`` steps; None: no bound.

    ``batch_size`` is the number of groups that one rollout takes.
    """

    limit: int | None
    batch_size: int

    def may_start(self, ahead: int, rollout_id: int, step: int | None) -> bool:
        """True when a group started now, at weights of ``step``, can be young enough when its turn comes.

        ``ahead`` groups are to be consumed before it, the first of them by rollout ``rollout_id``.
        """
        if self.limit is None or step is None:
            return True
        return rollout_id + ahead // self.batch_size - step <= self.limit

    def is_too_old(self, step: int | None, rollout_id: int) -> bool:
        """True when tokens of weights of ``step`` must not be trained on by rollout ``rollout_id``."""
        if self.limit is None or step is None:
            return False
        return step == UNKNOWN_WEIGHTS or rollout_id - step > self.limit

    def is_last_chance(self, step: int | None, rollout_id: int) -> bool:
        """True when tokens of weights of ``step`` are too old for every rollout after ``rollout_id``."""
        return self.is_too_old(step, rollout_id + 1)


def stamp_steps(samples: Sample | list[Any], clock: WeightClock, since: int | None = None) -> None:
    """Write the step of each version into the spans of nested samples: version numbers mean nothing after a restart.

    ``since`` is the step of the engines' weights when the generation began. It is the step of spans that may hold older
    tokens than their version says, and of trained tokens in no span: they get one with the version None.
    """
    for sample in iter_samples(samples):
        spans = [_stamped(span, clock, since) for span in sample.weight_version_spans]
        if since is not None:
            spans = sorted([*spans, *_unclaimed(sample, spans, since)], key=lambda span: int(span["start"]))
        if spans != sample.weight_version_spans:
            sample.weight_version_spans = spans


def _stamped(span: dict[str, Any], clock: WeightClock, since: int | None) -> dict[str, Any]:
    if span.get("step") is not None:
        return span
    step = clock.step_of(span["version"])
    if span.get("at_end") and since is not None:
        least = clock.least_step_of(span["version"])
        end = {} if step is None else {"end_step": step}
        return {**span, "step": since if least is None else min(since, least), **end}
    return span if step is None else {**span, "step": step}


def _unclaimed(sample: Sample, spans: list[dict[str, Any]], since: int) -> Iterator[dict[str, Any]]:
    """Yield spans for the trained tokens that are in none of ``spans`` (in order)."""
    ends = [0, *(span["end"] for span in spans)]
    starts = [*(span["start"] for span in spans), sample.response_length]
    for start, end in zip(ends, starts, strict=True):
        if start < end and (sample.loss_mask is None or any(sample.loss_mask[start:end])):
            yield {"version": None, "start": start, "end": end, "step": since}


def with_all_steps(group: Sample | list[Any], clock: WeightClock) -> Any:
    """Return a (nested) group, or a copy of it, whose spans all have a step: what may outlive this process.

    Spans of a version that is not known to the clock yet get the least step they can have.
    """
    if all(_settled(s.weight_version_spans, clock) == s.weight_version_spans for s in iter_samples(group)):
        return group
    group = copy_group(group)
    settle_steps(group, clock)
    return group


def settle_steps(samples: Sample | list[Any], clock: WeightClock) -> None:
    """Give spans without a step the least they can have, where the clock will not learn their version."""
    for sample in iter_samples(samples):
        spans = _settled(sample.weight_version_spans, clock)
        if spans != sample.weight_version_spans:
            sample.weight_version_spans = spans


def _settled(spans: list[dict[str, Any]], clock: WeightClock) -> list[dict[str, Any]]:
    found = []
    for span in spans:
        step = span.get("step")
        least = clock.least_step_of(span["version"]) if step is None else None
        found.append(span if least is None else {**span, "step": least})
    return found


def trained_steps(sample: Sample, clock: WeightClock) -> Iterator[tuple[int | None, int]]:
    """Yield ``(step, tokens)`` of the tokens that the loss covers; the step is None for those of unknown origin."""
    known = 0
    for span in sample.weight_version_spans:
        start, end = span["start"], span["end"]
        count = end - start if sample.loss_mask is None else int(sum(sample.loss_mask[start:end]))
        step = span.get("step")
        step = clock.least_step_of(span["version"]) if step is None else step
        if count and step is not None:
            known += count
            yield step, count
    if (rest := int(sample.effective_response_length) - known) > 0:
        yield None, rest


def oldest_step(samples: Sample | list[Any], clock: WeightClock, default: int | None) -> int | None:
    """Return the step of the oldest trained token of nested samples; ``default`` is that of tokens of unknown origin.

    None when nothing is known of any.
    """
    steps = [
        step if step is not None else default for s in iter_samples(samples) for step, _ in trained_steps(s, clock)
    ]
    return min((step for step in steps if step is not None), default=default)


def mask_older_versions(samples: Sample | list[Any]) -> int:
    """Leave the tokens out of the loss that are, or may be, older than the newest weights in their sample; return how
    many. For samples with stamped steps.

    ``--mask-offpolicy-in-partial-rollout`` for responses that continued under new weights.
    """
    masked = 0
    for sample in iter_samples(samples):
        spans = sample.weight_version_spans
        older = [span for span in spans if _is_older(span, spans[-1])]
        if not older:
            continue
        mask = [1] * sample.response_length if sample.loss_mask is None else [int(m) for m in sample.loss_mask]
        for span in older:
            masked += sum(mask[span["start"] : span["end"]])
            mask[span["start"] : span["end"]] = [0] * (span["end"] - span["start"])
        sample.loss_mask = mask
    return masked


def _is_older(span: dict[str, Any], last: dict[str, Any]) -> bool:
    """True when tokens of ``span`` may be older than the weights at the end of the sample's ``last`` span."""
    step, newest = span.get("step"), last.get("end_step" if last.get("at_end") else "step")
    if newest is None:  # not known to the clock yet, so newer than all that it knows
        return step is not None or bool(span["version"] != last["version"])
    return bool(span["version"] != last["version"]) if step is None else bool(step < newest)
