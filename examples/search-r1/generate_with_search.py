"""``generate_with_search`` with this folder on PYTHONPATH, of older scripts: ``examples.search_r1``."""

from __future__ import annotations

from examples.search_r1.generate_with_search import generate, reward_func

__all__ = ["generate", "reward_func"]
