"""``--custom-generate-function-path examples.retool.generate_with_retool.generate`` of older scripts."""

from __future__ import annotations

from pathlib import Path

from examples.older_names import generate_in, reward_func

__all__ = ["generate", "reward_func"]

generate = generate_in(Path(__file__).with_name("retool.yaml"))
