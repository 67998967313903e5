"""Rewards."""

from __future__ import annotations

from slime.algorithms.reward_types import BOXED, REWARD_TYPES
from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract

*OTHERS, LAST = REWARD_TYPES


class Reward(ArgumentGroup):
    """Rewards and the conversion of samples to train data."""

    title = "reward"
    read_by = "run"

    rm_type: str | None = flag(
        None,
        f"built-in reward: {', '.join(OTHERS)} or {LAST}; with the "
        f'prefix {BOXED} only the content of the last \\boxed{{}} is graded; metadata["rm_type"] of a sample wins',
        silenced_by=("rollout without samples", "episodes", "replay"),
        decides_generation=True,
    )
    reward_key: str | None = flag(
        None,
        "key of the number to train on, when rewards are objects",
        silenced_by=("own conversion",),
        decides_generation=True,
    )
    eval_reward_key: str | None = flag(
        None,
        "key of the number to report in evaluation, when rewards are objects; default: --reward-key",
        needs="--eval-interval",
    )
    group_rm: bool = flag(
        False,
        "score all responses to a prompt together instead of one by one",
        silenced_by=("rollout without samples", "replay"),
        decides_generation=True,
    )
    rm_url: str | None = flag(None, "address of the reward model of --rm-type remote_rm", decides_generation=True)
    reward_workers: int | None = flag(
        None,
        "processes that compute built-in rewards; default: one per four cores, at least 1 and at most 8",
        ge=1,
        silenced_by=("own reward",),
    )
    reward_time_limit: float = flag(
        5.0,
        "seconds of CPU time a built-in reward may take; six times as many on the clock",
        gt=0,
        silenced_by=("own reward",),
    )
    reward_timeout: float | None = flag(
        None, "seconds one reward may take, your own included; default: --rollout-request-timeout", gt=0
    )
    reward_failure_tolerance: float = flag(
        0.1,
        "share of a rollout's rewards that may fail before the run stops (four may in any case); 0: the first one "
        "stops it",
        ge=0,
        le=1,
        silenced_by=("rollout without samples", "replay"),
    )
    custom_rm_path: DottedPath | None = flag(
        None,
        "dotted path of your own reward function, instead of --rm-type",
        hook=Contract(
            "fn(args, sample, **kwargs), or fn(args, samples, **kwargs) with --group-rm",
            2,
            generates=True,
            makes_samples=True,
            changes_samples=True,
        ),
        silenced_by=("rollout without samples", "episodes", "replay"),
        decides_generation=True,
    )
    custom_reward_post_process_path: DottedPath | None = flag(
        None,
        "dotted path of your own normalization of rewards; default: within the group of a prompt",
        hook=Contract("fn(args, samples)", 2, changes_samples=True),
        silenced_by=("own conversion",),
    )
    custom_convert_samples_to_train_data_path: DottedPath | None = flag(
        None,
        "dotted path of your own conversion of samples to train data, rewards included",
        hook=Contract("fn(args, samples)", 2, changes_samples=True),
    )
