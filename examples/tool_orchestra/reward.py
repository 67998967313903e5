"""The reward of a group of executions, and what is left of it to train on."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

from examples.tool_orchestra.rollout import KEY
from slime.algorithms.rewards import normalize_rewards, preference_rewards
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample, iter_samples

LARGEST = 3.0
LEAST_STD = 0.1


async def preference_reward(args: Namespace, samples: list[Any], **kwargs: Any) -> None:
    """Set the rewards of a group (``--group-rm --custom-rm-path``): those of its executions, on each of their turns.

    A wrong execution has 0; a right one what its features are worth by the preferences of the row, scaled between the
    least and the most of the group.
    """
    flat = list(iter_samples(samples))
    executions = {one.rollout_id: one.metadata[KEY] for one in flat}
    preferences = next(iter(executions.values()))["preferences"]
    about = list(executions.values())
    rewards = preference_rewards([one["features"] for one in about], preferences, [one["correct"] for one in about])
    by_id = dict(zip(executions, rewards, strict=True))
    for one in flat:
        one.reward = by_id[one.rollout_id]


def is_varied(args: Namespace, group: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards have a standard deviation above 0.1 (``--dynamic-sampling-filter-path``)."""
    rewards = list({one.rollout_id: float(one.reward) for one in iter_samples(group)}.values())
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return DynamicFilterOutput(spread > LEAST_STD, None if spread > LEAST_STD else "little_spread")


def clipped_advantages(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Return rewards, and those normalized over the executions of a prompt, within -3 and 3
    (``--custom-reward-post-process-path``)."""
    raw = [float(one.get_reward_value(args)) for one in samples]
    return raw, [max(-LARGEST, min(LARGEST, reward)) for reward in normalize_rewards(args, samples, raw)]
