r"""Make the data of the small version: drawings of rectangles, whose sides are to be read.

python -m examples.geo3k_vlm.make_data --out data --seed 0

In four of ten conversations in ``sft.jsonl`` one of the two digits is wrong. ``train.jsonl`` and ``drawings.jsonl``
(held out) have problems and labels, ``exchanged.jsonl`` has the held-out problems with each other's pictures.
``eval.yaml`` is for ``--eval-config``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.geo3k_vlm.drawings import boxed, drawings, picture, row, write_held_out
from examples.quickstart.make_data import slip, write

ASKED = "Sides?"
SLIPS = 0.4
TRAIN = 2000


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the files to ``out``. The held-out problems do not depend on ``seed``."""
    train, held_out = drawings()
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)

    def demonstration() -> dict[str, Any]:
        one = train.draw(rng)
        sides = slip(one.sides, rng) if rng.random() < SLIPS else one.sides
        return row(ASKED, picture(one), replies=(boxed(sides),))

    write(out / "sft.jsonl", (demonstration() for _ in range(demonstrations)))
    problems = (train.draw(rng) for _ in range(TRAIN))
    write(out / "train.jsonl", (row(ASKED, picture(one), label=one.sides) for one in problems))
    write_held_out(out, "drawings", [(ASKED, picture(one), one.sides) for one in held_out])


if __name__ == "__main__":
    data_command(__doc__, make_data)
