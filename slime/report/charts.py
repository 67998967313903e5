"""Which metrics share a chart, and in which order a reader wants to see them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """A chart: the metrics that match one of ``patterns`` (regular expressions, whole names), in their order."""

    title: str
    note: str
    patterns: tuple[str, ...]
    stacked: bool = False


CHARTS = (
    Chart("Evaluation", "mean reward on the held-out data sets", (r"eval/[^/]+(?<!-truncated_ratio)(?<!pass@\d)",)),
    Chart("Reward", "mean raw reward of the rollout", (r"rollout/raw_reward",)),
    Chart("Response length", "tokens", (r"rollout/response_len/(mean|max)",)),
    Chart("Entropy", "nats per token", (r"train/entropy_loss", r"rollout/entropy")),
    Chart("KL", "to the reference (kl_loss) and to the policy that generated (ppo_kl)", (
        r"train/kl_loss", r"train/ppo_kl")),
    Chart(
        "Log-prob difference",
        "mean |trainer - engine|; numerical noise only, unless the policies differ",
        (r"train/train_rollout_logprob_abs_diff",),
    ),
    Chart("Loss", "", (r"train/(critic-)?(loss|pg_loss|value_loss)",)),
    Chart("Gradient norm", "before clipping", (r"train/(critic-)?grad_norm",)),
    Chart("Clipped tokens", "share of the tokens whose policy ratio was clipped", (
        r"train/pg_clipfrac", r"train/tis_clipfrac")),
    Chart("Unfinished responses", "share cut off at the length limit, or repeating themselves", (
        r"rollout/truncated_ratio", r"rollout/repetition_frac")),
    Chart("Pass rate", "", (r"passrate/.+", r"eval/.+pass@\d+")),
    Chart("Learning rate", "", (r"train/(critic-)?lr-.+",)),
    Chart("Generation speed", "tokens per second and slot of the engines", (r"perf/tokens_per_gpu_per_sec",)),
    Chart("Training speed", "tokens per second", (r"perf/actor_train_tok_per_s",)),
    Chart("Time per stage", "seconds of each step of the loop, stacked", tuple(
        rf"perf/stage/{name}_time" for name in ("generate", "train", "sync_weights", "save", "eval", ".+")),
        stacked=True),
    Chart("Time inside training", "seconds per rollout on the main rank, stacked", tuple(
        rf"perf/{name}_time" for name in (
            "data_preprocess", "ref_log_probs", "teacher_log_probs", "log_probs", "actor_train", "ref_model_update",
            "sleep", "wake_up", "save_model", "update_weights")),
        stacked=True),
)  # fmt: skip


def arrange(names: Iterable[str]) -> tuple[list[tuple[Chart, list[str]]], list[str]]:
    """Return ``[(chart, its metrics)]`` for the charts that have any, and the names of all other metrics."""
    left = sorted(names)
    placed = []
    for chart in CHARTS:
        chosen = [name for pattern in chart.patterns for name in left if re.fullmatch(pattern, name)]
        chosen = list(dict.fromkeys(chosen))
        if chosen:
            placed.append((chart, chosen))
            left = [name for name in left if name not in chosen]
    return placed, left
