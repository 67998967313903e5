"""The verdict of a dynamic sampling filter, and the count of what it dropped."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.rollout.hooks.hook import Hook, describe, finish, for_samples


@dataclass
class DynamicFilterOutput:
    """Keep a group or drop it for ``reason``.

    With ``keep_when_insufficient`` a dropped group is kept after all when no more groups are on the way than needed.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: object, **kwargs: object) -> DynamicFilterOutput:
    """Call a filter; no filter keeps everything, a bare truth value is wrapped.

    A coroutine function is waited for, which keeps an event loop from everything else: await
    ``await_dynamic_filter`` there. Raises TypeError for a filter that returns nothing.
    """
    return DynamicFilterOutput(keep=True) if fn is None else _verdict(fn, finish(fn(*args, **kwargs)), args)


async def await_dynamic_filter(fn: Callable[..., Any] | None, *args: object, **kwargs: object) -> DynamicFilterOutput:
    """As ``call_dynamic_filter``, for coroutines."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn.awaited(*args, **kwargs) if isinstance(fn, Hook) else fn(*args, **kwargs)
    return _verdict(fn, await output if inspect.isawaitable(output) else output, args)


def _verdict(fn: Callable[..., Any], output: object, args: tuple[Any, ...]) -> DynamicFilterOutput:
    if output is None:  # a forgotten return would drop every group there is
        raise TypeError(f"{describe(fn)} returned None{for_samples(args)}; expected a bool or a DynamicFilterOutput")
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """True when the group is to be dropped; ``remaining_batch_size`` counts groups accepted or on the way."""
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return ``{"rollout/dynamic_filter/drop_<reason>": count}``."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
