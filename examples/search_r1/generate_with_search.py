"""``--custom-generate-function-path examples.search_r1.generate_with_search.generate`` of older scripts."""

from __future__ import annotations

from pathlib import Path

from examples.older_names import generate_in, reward_func

__all__ = ["generate", "reward_func"]

generate = generate_in(Path(__file__).with_name("search.yaml"))
