"""A reward that one data set of the small version names (``custom_rm_path``), and a metric of all of them."""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

from slime.observability.logging_utils import log
from slime.rollout.rm_hub.answer_text import final_answer
from slime.utils.types import Sample


async def in_capitals(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1 for the label in capitals, else 0."""
    return float(final_answer(sample.response).strip() == str(sample.label).upper())


def log_best_of_n(rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], metrics: dict[str, Any]) -> bool:
    """Log, beside the mean, the mean over prompts of the best reward (``--custom-eval-rollout-log-function-path``).

    That is pass@n where rewards are 0 and 1; the gap to the mean is what sampling again would gain.
    """
    found = {}
    for name, one in data.items():
        best: dict[int, float] = {}
        for sample, reward in zip(one["samples"], one["rewards"], strict=True):
            best[sample.group_index] = max(reward, best.get(sample.group_index, reward))
        found[f"eval/{name}/best_of_n"] = statistics.fmean(best.values())
    log(args, {**found, "eval/step": rollout_id}, "eval/step")
    return False
