"""Make pictures of squares and questions about them.

python -m examples.geo3k_vlm_multi_turn.make_data --out data --seed 0

``train.jsonl`` and ``squares.jsonl`` (held out) have ``messages`` with ``<image>``, the picture in ``images``, and the
number of red squares as ``label``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from examples.geo3k_vlm_multi_turn.squares import picture
from examples.quickstart.make_data import write
from slime.utils.processing_utils import encode_image_for_rollout_engine

QUESTION = "<image>How many red squares?"
HELD_OUT, TRAIN = 128, 1024


def row(seed: int) -> dict[str, Any]:
    """Return the question about the picture of a seed."""
    image, count = picture(seed)
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "images": [encode_image_for_rollout_engine(image)], "label": str(count)}


def make_data(out: Path, *, seed: int) -> None:
    """Write the two files to ``out``. The held-out pictures do not depend on ``seed``."""
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    seeds = rng.sample(range(HELD_OUT, 1_000_000), TRAIN)
    write(out / "train.jsonl", map(row, seeds))
    write(out / "squares.jsonl", map(row, range(HELD_OUT)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures of train.jsonl")
    options = parser.parse_args()
    make_data(options.out, seed=options.seed)


if __name__ == "__main__":
    main()
