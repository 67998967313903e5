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
    """Weights and masks of train and rollout log-probs and masks by sample, token by token, without normalisation."""
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
