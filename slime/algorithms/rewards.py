"""Rewards relative to the other answers to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np

from slime.algorithms.estimators import estimator_of
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.arguments.args import Args

_EPSILON = 1e-6


def post_process_rewards(args: Args, samples: Sequence[Sample]) -> tuple[list[Any], list[float]]:
    """Return (raw rewards, rewards to train on), the default of ``--custom-reward-post-process-path``.

    Raw is the sample's reward, or its ``args.reward_key`` entry; see ``normalize_rewards`` for the other.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, normalize_rewards(args, samples, raw)


def normalize_rewards(args: Args, samples: Sequence[Sample], raw_rewards: Sequence[Any] | None = None) -> list[float]:
    """Return the rewards to train on, one per sample.

    With ``args.rewards_normalization`` and an estimator that has a ``baseline`` rewards are centered per group: on the
    group's mean, or on the mean of the group's other trajectories (leave one out). With ``scale_by_std`` they are
    divided by the group's standard deviation unless ``args.grpo_std_normalization`` is off.
    Other estimators get raw rewards. A group is what shares a ``group_index``,
    however many samples that are, but for those whose reward failed, which get 0; without any index, consecutive runs
    of ``n_samples_per_prompt`` when the count is that of a full rollout. A trajectory (``rollout_id``) of several
    samples counts once in the statistics, unless ``args.reward_statistics`` is "samples".

    Raises ValueError, naming the sample, for a reward that is not a finite number and for groups that are not known.
    """
    raw = [sample.get_reward_value(args) for sample in samples] if raw_rewards is None else raw_rewards
    rewards = [_finite(sample, reward) for sample, reward in zip(samples, raw, strict=True)]
    estimator = estimator_of(args)
    if estimator.baseline is None or not args.rewards_normalization:
        return rewards
    groups: list[Hashable] = [
        ("no reward", position) if reward_failed(sample) else group
        for position, (sample, group) in enumerate(zip(samples, _groups(args, samples), strict=True))
    ]
    if estimator.baseline == "leave_one_out":
        return leave_one_out(rewards, groups, [sample.rollout_id for sample in samples])
    scale = estimator.scale_by_std and args.grpo_std_normalization
    ids = [sample.rollout_id for sample in samples] if args.reward_statistics == "trajectories" else None
    return normalize_by_group(rewards, groups, ids, divide_by_std=scale)


def normalize_by_group(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    divide_by_std: bool,
    epsilon: float = _EPSILON,
) -> list[float]:
    """Return ``R - mean(group)``, divided by ``std(group) + epsilon`` on demand (GRPO, arXiv:2402.03300).

    The standard deviation is unbiased. A group of one, and one whose rewards are all equal, gives exactly 0.

    Samples of one trajectory (the same id in ``rollout_ids``; None is a separate trajectory) count once: with ``E``
    trajectories the mean is that of their means, the variance ``sum_e mean_{i in e} (R_i - mean)^2 / (E - 1)``, which
    are those of E rewards where the samples of a trajectory share theirs. The samples of a group's only trajectory are
    compared with each other.
    """
    values = np.asarray(rewards, dtype=np.float64)
    result = np.zeros_like(values)
    for trajectories in _trajectories(group_indices, rollout_ids):
        positions = [position for trajectory in trajectories for position in trajectory]
        peers = values[positions]
        if peers.min() == peers.max():
            continue
        count = len(trajectories)
        if 1 < count < len(positions):
            mean = math.fsum(values[trajectory].mean() for trajectory in trajectories) / count
            squares = math.fsum(np.square(values[trajectory] - mean).mean() for trajectory in trajectories)
            std = math.sqrt(squares / (count - 1))
        else:
            mean, std = peers.mean(), peers.std(ddof=1)
        result[positions] = (peers - mean) / (std + epsilon) if divide_by_std else peers - mean
    return [float(value) for value in result]


def leave_one_out(
    values: Sequence[float], group_indices: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None = None
) -> list[float]:
    """Return ``R_i - mean(R of the other trajectories)`` (RLOO, arXiv:2402.14740): ``n / (n-1) (R_i - mean(R))``.

    The baseline must not depend on what it is the baseline of: samples of one trajectory (the same id in
    ``rollout_ids``; None is a separate trajectory) are left out together, and a trajectory counts once in the
    baseline of others, with the mean of its samples. Without another trajectory there is nothing to compare with: 0.
    """
    result = [0.0] * len(values)
    for trajectories in _trajectories(group_indices, rollout_ids):
        means = [math.fsum(values[i] for i in positions) / len(positions) for positions in trajectories]
        total = math.fsum(means)
        if len(means) == 1:
            continue
        for own, positions in zip(means, trajectories, strict=True):
            for i in positions:
                result[i] = values[i] - (total - own) / (len(means) - 1)
    return result


def preference_rewards(
    features: Sequence[Mapping[str, float]], preferences: Mapping[str, float], correct: Sequence[bool]
) -> list[float]:
    """Return ``sum_f p_f (x_f - min_f) / (max_f - min_f)`` of right answers, 0 of wrong ones (ToolOrchestra,
    arXiv:2511.21689).

    features: per execution of one prompt, x by name: calls of a tool, or what shall be small with its sign turned,
    such as minus the cost; all have the same names. preferences: p by name, 0 where it is left out. Minima and maxima
    are over the executions, and a feature that all share shows nothing. Raises ValueError for features without the
    names of the others or of ``preferences``.
    """
    names = set(features[0])
    if uneven := next((i for i, found in enumerate(features) if set(found) != names), None):
        raise ValueError(f"execution {uneven} has the features {sorted(features[uneven])}, the first {sorted(names)}")
    if unknown := sorted(set(preferences) - names):
        raise ValueError(f"preferences name {unknown}, which are no features; those are {sorted(names)}")
    lowest = {name: min(found[name] for found in features) for name in names}
    spans = {name: max(found[name] for found in features) - lowest[name] for name in names}
    scored = [name for name in preferences if spans[name] > 0]
    return [
        math.fsum(preferences[name] * (found[name] - lowest[name]) / spans[name] for name in scored) if right else 0.0
        for found, right in zip(features, correct, strict=True)
    ]


def _trajectories(group_indices: Sequence[Hashable], rollout_ids: Sequence[Hashable] | None) -> list[list[list[int]]]:
    """Return the positions of the samples of every trajectory of every group."""
    ids = [None] * len(group_indices) if rollout_ids is None else rollout_ids
    groups: dict[Hashable, dict[Hashable, list[int]]] = {}
    for position, (group, rollout_id) in enumerate(zip(group_indices, ids, strict=True)):
        trajectory = ("alone", position) if rollout_id is None else ("shared", rollout_id)
        groups.setdefault(group, {}).setdefault(trajectory, []).append(position)
    return [list(trajectories.values()) for trajectories in groups.values()]


def _groups(args: Args, samples: Sequence[Sample]) -> list[Hashable]:
    indices: list[Hashable] = [sample.group_index for sample in samples]
    unknown = [position for position, index in enumerate(indices) if index is None]
    if not unknown:
        return indices
    if len(unknown) == len(samples) == args.n_samples_per_prompt * args.rollout_batch_size:
        return [position // args.n_samples_per_prompt for position in range(len(samples))]
    raise ValueError(
        f"rewards are normalized per group, but {len(unknown)} of {len(samples)} samples have no group_index (first: "
        f"position {unknown[0]}, index={samples[unknown[0]].index}) and {len(samples)} is not --rollout-batch-size "
        f"{args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}. Set group_index in the "
        "rollout function, or use --disable-rewards-normalization or --custom-reward-post-process-path"
    )


def reward_failed(sample: Sample) -> bool:
    """Return True if the sample has a 0 in the place of a reward that failed: nothing is to be compared with it."""
    return sample.remove_sample and "reward_error" in (sample.metadata or {})


def _finite(sample: Sample, reward: SupportsFloat) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"sample index={sample.index} group_index={sample.group_index} (status {sample.status.value}): reward "
            f"{reward!r} is not a finite number; check the reward function, or --reward-key when it returns a dict"
        )
    return value
