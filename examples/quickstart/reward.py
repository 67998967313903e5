"""The quickstart's reward, and the control that takes the meaning out of it."""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from slime.utils.types import Sample

END = "<|im_end|>"


async def exact_answer(args: argparse.Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1 for a response that ended by itself and equals the label, else 0 (``--custom-rm-path``)."""
    finished = sample.status == Sample.Status.COMPLETED
    return float(finished and sample.response.removesuffix(END).strip() == sample.label)


def shuffled_rewards(args: argparse.Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Deal the rewards of a rollout out at random, then normalize them as usual.

    A control, for ``--custom-reward-post-process-path``: the same rewards in the same numbers, but they no longer say
    which answer was right. What a model still gains under it is not learned from the reward. Returns the raw rewards as
    they were earned, and group-normalized shuffled ones.
    """
    raw = [float(sample.reward) for sample in samples]  # type: ignore[arg-type]
    dealt = list(raw)
    random.Random(samples[0].index).shuffle(dealt)
    groups: dict[int | None, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(position)
    normalized = [0.0] * len(samples)
    for positions in groups.values():
        rewards = [dealt[i] for i in positions]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        for i in positions:
            normalized[i] = (dealt[i] - mean) / (spread + 1e-6)
    return raw, normalized
