"""A reward for agents that choose among priced tools: right answers, weighed by what the user prefers."""

from __future__ import annotations

from typing import Any

from slime.algorithms.rewards import preference_rewards
from slime.arguments.args import Args
from slime.utils.types import Sample, iter_samples

__all__ = ["group_reward"]

KEYS = ("features", "preferences", "correct")


def group_reward(args: Args, samples: list[Any], **kwargs: object) -> list[float]:
    """Return ``preference_rewards`` of a prompt's executions, one per sample (``--group-rm``).

    Of ``sample.metadata``: ``features`` (numbers by name), ``preferences`` (weights by name, those of the prompt),
    ``correct``; all samples of an execution hold the same. Raises ValueError naming a sample that lacks one, or whose
    preferences are not those of the first.
    """
    flat: list[Sample] = list(iter_samples(samples))
    for sample in flat:
        if missing := [key for key in KEYS if key not in (sample.metadata or {})]:
            raise ValueError(f"sample index={sample.index}: metadata has no {missing}; the generate function sets them")
        if sample.metadata["preferences"] != flat[0].metadata["preferences"]:
            raise ValueError(f"sample index={sample.index}: preferences differ from those of the group's first sample")
    features, correct = ([sample.metadata[key] for sample in flat] for key in ("features", "correct"))
    return preference_rewards(features, flat[0].metadata["preferences"], correct)
