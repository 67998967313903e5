"""Token-by-token loops in Python floats, straight from the formulas."""

from __future__ import annotations

import math
from typing import Any


def kl(p: float, base: float, kind: str, ratio: float = 1.0) -> float:
    d = p - base
    value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "low_var_kl": math.exp(-d) - 1 + d}[kind] * ratio
    return max(-10.0, min(10.0, value)) if kind == "low_var_kl" else value


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(len(rewards) - t):
            following = values[t + k + 1] if t + k + 1 < len(values) else 0.0
            total += (gamma * lambd) ** k * (rewards[t + k] + gamma * following - values[t + k])
        advantages.append(total)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def ppo(kl_: float, advantage: float, low: float, high: float, c: float | None) -> tuple[float, float]:
    ratio = math.exp(-kl_)
    first, second = -ratio * advantage, -clip(ratio, 1 - low, 1 + high) * advantage
    loss = max(first, second)
    if c is not None and advantage < 0:
        loss = min(-c * advantage, loss)
    return loss, float(second > first)


def masked_mean(values: list[float], mask: list[int]) -> float:
    return sum(v * m for v, m in zip(values, mask, strict=True)) / max(sum(mask), 1)


def mismatch(tokens: list[tuple[float, float, int]]) -> list[float]:
    """Sums of |d|, k1, k3, the count and the largest |d| over trained (train, rollout, mask)."""
    found = [train - rollout for train, rollout, mask in tokens if mask]
    k3 = [math.exp(d) - 1 - d for d in found]
    largest = max((abs(d) for d in found), default=0.0)
    return [math.fsum(map(abs, found)), -math.fsum(found), math.fsum(k3), float(len(found)), largest]


def mis(args: Any, data: dict[str, Any]) -> tuple[list[list[float]], list[list[int]]]:
    """Weights and masks of train and rollout log-probs and masks by sample, token by token, without normalization."""
    upper = args.tis_upper_bound
    lower = getattr(args, "tis_lower_bound", None)
    lower = 1 / upper if lower is None else lower
    rs_lower, rs_upper = getattr(args, "rs_lower_bound", lower), getattr(args, "rs_upper_bound", upper)
    all_weights, all_masks = [], []
    for train, rollout, mask in zip(*data.values(), strict=True):
        d = [float(a) - float(b) for a, b in zip(train, rollout, strict=True)]
        m = [int(x) for x in mask]
        used = [x for x, on in zip(d, m, strict=True) if on]
        joint = {"sequence": math.exp(sum(used)), "geometric": math.exp(sum(used) / len(used)) if used else 1.0}
        weights, kept = [], []
        for x, on in zip(d, m, strict=True):
            ratio = joint.get(args.tis_level, math.exp(x))
            if args.tis_mode == "truncate":
                weight = min(ratio, upper)
            elif args.tis_mode == "clip":
                weight = min(max(ratio, lower), upper)
            else:
                weight = ratio if lower <= ratio <= upper else 0.0
            weights.append(weight if args.use_tis else 1.0)
            ratio = joint.get(getattr(args, "rs_level", args.tis_level), math.exp(x))
            kept.append(int(on and (rs_lower <= ratio <= rs_upper)))
        veto = getattr(args, "rs_veto_threshold", None)
        if veto is not None and any(math.exp(x) < veto for x in used):
            kept = [0] * len(kept)
        all_weights.append(weights)
        all_masks.append(kept if getattr(args, "use_rs", False) else m)
    return all_weights, all_masks


def grpo(rewards: list[float], groups: list[int], std: bool) -> list[float]:
    """Rewards minus the mean of their group, over its unbiased standard deviation + 1e-6 on demand."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((p - mean) ** 2 for p in peers) / (len(peers) - 1)) if len(peers) > 1 else 0.0
        centered = reward - mean if deviation else 0.0
        result.append(centered / (deviation + 1e-6) if std else centered)
    return result


def rloo(rewards: list[float], groups: list[int], trajectories: list[int | None]) -> list[float]:
    """Rewards minus the mean over the group's other trajectories of the mean reward of each."""
    result = []
    for i, (reward, group, trajectory) in enumerate(zip(rewards, groups, trajectories, strict=True)):
        others: dict[Any, list[float]] = {}
        for j, other in enumerate(rewards):
            same = j == i or (trajectory is not None and trajectories[j] == trajectory)
            if groups[j] == group and not same:
                others.setdefault(("alone", j) if trajectories[j] is None else trajectories[j], []).append(other)
        means = [sum(values) / len(values) for values in others.values()]
        result.append(reward - sum(means) / len(means) if means else 0.0)
    return result


def over_trained(mask: list[int], column: list[float]) -> list[float]:
    return [value for value, on in zip(column, mask, strict=True) if on]


def spread(mask: list[int], trained: list[float]) -> list[float]:
    """The values of trained tokens at their places, 0 elsewhere."""
    left = iter(trained)
    return [next(left) if on else 0.0 for on in mask]


def reinforce_plus_plus(reward: float, kls: list[float], mask: list[int], coef: float, gamma: float) -> list[float]:
    """Discounted sums over trained tokens of -coef * kl, with the reward at the last of them."""
    rewards = [-coef * k for k in over_trained(mask, kls)]
    if rewards:
        rewards[-1] += reward
    return spread(mask, discounted(rewards, gamma))


def ppo_advantages(
    reward: float, kls: list[float], values: list[float], mask: list[int], coef: float, gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """GAE over trained tokens of -coef * kl, with the reward at the last of them; and the returns."""
    rewards = [-coef * k for k in over_trained(mask, kls)]
    if rewards:
        rewards[-1] += reward
    advantages, returns = gae(rewards, over_trained(mask, values), gamma, lambd)
    return spread(mask, advantages), spread(mask, returns)


def whiten(values: list[float], mask: list[int], shift: bool) -> list[float]:
    kept = [v for v, m in zip(values, mask, strict=True) if m]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / max(len(kept) - 1, 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift else mean) for v in values]


def cispo(kl_: float, log_prob: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    ratio = math.exp(-kl_)
    weight = clip(ratio, 1 - low, 1 + high)
    return -weight * advantage * log_prob, float(weight != ratio)


def opsm(samples: list[list[tuple[float, float, int, float]]], delta: float) -> tuple[list[float], float]:
    """Keep flags and the metric, of (new, old, mask, advantage) per token."""
    keep, metric = [], 0.0
    for sample in samples:
        mean = masked_mean([old - new for new, old, _, _ in sample], [mask for _, _, mask, _ in sample])
        dropped = [advantage < 0 and mean > delta for _, _, _, advantage in sample]
        keep += [0.0 if drop else 1.0 for drop in dropped]
        masks = [mask for _, _, mask, _ in sample]
        metric += sum(drop and mask for drop, mask in zip(dropped, masks, strict=True)) / max(sum(masks), 1)
    return keep, metric


def value(v: float, old: float, target: float, bound: float) -> tuple[float, float]:
    clipped = clip(v, old - bound, old + bound)
    return max((clipped - target) ** 2, (v - target) ** 2), float(abs(v - old) > bound)


def bounded_ratio(train: float, rollout: float, low: float, high: float, masks: bool) -> float:
    """TIS, or with ``masks`` IcePop."""
    ratio = math.exp(train - rollout)
    return (ratio if low <= ratio <= high else 0.0) if masks else clip(ratio, low, high)


def log_prob_and_entropy(logits: list[float], target: int, temperature: float) -> tuple[float, float]:
    scaled = [z / temperature for z in logits]
    peak = max(scaled)
    total = math.fsum(math.exp(z - peak) for z in scaled)
    log_p = [z - peak - math.log(total) for z in scaled]
    return log_p[target], -math.fsum(math.exp(p) * p for p in log_p)


def reduced(values: list[list[float]], masks: list[list[int]], divisors: list[float]) -> float:
    """Sum over samples of the masked sum over tokens, over the sample's divisor."""
    return sum(
        sum(v * m for v, m in zip(row, mask, strict=True)) / divisor
        for row, mask, divisor in zip(values, masks, divisors, strict=True)
    )
