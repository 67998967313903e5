"""Check that values that came from outside are numbers. ``True`` is none, and neither are infinity and NaN."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite int or float."""
    return type(value) in (int, float) and _fits(value)


def _fits(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def reward_problem(reward: object, key: str | None = None) -> str | None:
    """Return what is wrong with ``reward``, or None for a finite number, or an object of finite numbers and texts
    that has one at least, at ``key`` where that is given."""
    if is_number(reward) or isinstance(reward, bool):
        return None
    if not isinstance(reward, dict):
        return f"reward must be a finite number, or an object with some, got {reward!r:.100}"
    if key is not None and not is_number(reward.get(key)):
        return f"reward must have a finite number at {key!r} (--reward-key), got {reward!r:.100}"
    if not any(map(is_number, reward.values())):
        return f"reward must have a finite number in it, got {reward!r:.100}"
    return None
