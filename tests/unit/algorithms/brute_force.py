"""Token-by-token loops in Python floats, straight from the formulas."""

from __future__ import annotations

import math


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
