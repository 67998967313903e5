"""Filters that drop groups whose rewards carry no signal."""

from __future__ import annotations

import math

from slime.arguments.args import Args
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample, iter_samples

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]

MIN_STD = 1e-6


def check_reward_nonzero_std(args: Args, samples: list[Sample], **kwargs: object) -> DynamicFilterOutput:
    """Drop a group when the unbiased standard deviation of its rewards, in float64, is at most 1e-6.

    Rewards are those of all samples, however deep they are nested. Raises ValueError for one that is no number.
    """
    rewards = [_number(args, sample) for sample in iter_samples(samples)]
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="empty")
    keep = _unbiased_std(rewards) > MIN_STD
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Args, samples: list[Sample], **kwargs: object) -> DynamicFilterOutput:
    """As ``check_reward_nonzero_std``, but a batch that would stay short keeps the group."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output


def _number(args: Args, sample: Sample) -> float:
    reward = sample.get_reward_value(args)
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise ValueError(
            f"sample index={sample.index} group_index={sample.group_index}: reward {reward!r} is not a number; check "
            "the reward function, or --reward-key when it returns a dict"
        ) from None


def _unbiased_std(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
