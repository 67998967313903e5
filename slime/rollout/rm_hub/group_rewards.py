"""What a custom reward of several samples may return, for groups that may hold lists of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.hooks.hook import make_hook
from slime.rollout.rm_hub.failure import BadReward
from slime.utils.types import Sample

_MISSING = object()


def rewards_of(args: Any, samples: list[Any], returned: Any) -> list[Any]:
    """Return a reward per sample, in order, of what ``args.custom_rm_path`` ``returned`` for ``samples``.

    That is a list with one reward per sample; a list with an entry per entry of ``samples``, where that of a list of
    samples is a list of rewards or one reward for all of them; or None, when it has set every ``sample.reward`` itself.
    Raises BadReward for anything else.
    """
    flat = list(iter_samples(samples))
    if returned is None and all(sample.reward is not None for sample in flat):
        return [sample.reward for sample in flat]
    if _is_sequence(returned):
        if len(returned) == len(flat):
            return list(returned)
        found = list(_entry_by_entry(samples, returned))
        if len(found) == len(flat) and _MISSING not in found:
            return found
    lacking = [sample.index for sample in flat if sample.reward is None]
    seen = f"None, and left {lacking[:20]} without one" if returned is None else f"{returned!r:.200}"
    raise BadReward(
        f"{make_hook(args.custom_rm_path, 'custom_rm_path')} was given {len(flat)} samples (indices "
        f"{[sample.index for sample in flat]}) and must return a list of as many rewards, got {seen} (None is right "
        "after it has set the reward of each)"
    )


def nested_like(samples: Iterable[Any], rewards: Iterator[Any]) -> list[Any]:
    """Return ``rewards``, one per sample, in the nesting of ``samples``."""
    return [nested_like(entry, rewards) if isinstance(entry, list) else next(rewards) for entry in samples]


def _entry_by_entry(samples: list[Any], rewards: Any) -> Iterator[Any]:
    if len(samples) != len(rewards):
        yield _MISSING
        return
    for entry, reward in zip(samples, rewards, strict=True):
        if isinstance(entry, Sample):
            yield reward
        elif _is_sequence(reward):
            yield from _entry_by_entry(entry, reward)
        else:
            yield from [reward] * len(list(iter_samples(entry)))


def _is_sequence(value: Any) -> bool:
    """True for a list, a tuple or an array with a dimension, but no text and no object."""
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping)) and getattr(value, "ndim", 1) > 0
