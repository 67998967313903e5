"""``--custom-generate-function-path examples.strands_sglang.generate_with_strands.generate``, an older name."""

from __future__ import annotations

from examples.strands_sglang.generate import generate, reward_func

__all__ = ["generate", "reward_func"]
