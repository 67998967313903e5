"""``generate_with_tau`` with this folder on PYTHONPATH, of older scripts: ``examples.tau_bench``."""

from __future__ import annotations

from examples.tau_bench.generate_with_tau import generate, reward_func

__all__ = ["generate", "reward_func"]
