"""Make the data of the small version: pictures of two drawings, one of which is asked about.

python -m examples.geo3k_vlm_multi_turn.make_data --out data --seed 0

Half of the conversations in ``sft.jsonl`` look at the drawing that is asked about before they answer; the others guess.
``train.jsonl`` and ``pairs.jsonl`` (of held-out drawings) have problems and labels. ``exchanged.jsonl`` has the
held-out problems with each other's pictures. ``eval.yaml`` is for ``--eval-config``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from examples.data_command import data_command
from examples.geo3k_vlm.drawings import SIDES, Drawing, boxed, drawings, picture, row, write_held_out
from examples.geo3k_vlm_multi_turn.pairs import look
from examples.quickstart.make_data import write

TRAIN = 2000
SHARE_THAT_LOOKS = 0.5


class Pair(NamedTuple):
    """Two drawings, and the side that is asked about."""

    left: Drawing
    right: Drawing
    side: str

    @property
    def asked(self) -> str:
        """The problem."""
        return f"Sides, {self.side}?"

    @property
    def label(self) -> str:
        """The sides of the drawing that is asked about."""
        return (self.left if self.side == "left" else self.right).sides


def pair(draw: Callable[[random.Random], Drawing], rng: random.Random) -> Pair:
    """Return a problem with two drawings."""
    return Pair(draw(rng), draw(rng), rng.choice(("left", "right")))


def shown(one: Pair) -> Image.Image:
    """Return the picture of a problem: as large as that of one drawing, each is half as large."""
    return picture(one.left, one.right, cell=1)


def demonstration(one: Pair, rng: random.Random) -> dict[str, Any]:
    """Return a conversation that looks, or one that guesses."""
    image = shown(one)
    if rng.random() >= SHARE_THAT_LOOKS:
        return row(one.asked, image, replies=(boxed(f"{rng.choice(SIDES)}{rng.choice(SIDES)}"),))
    return row(one.asked, image, look(image, one.side), replies=(f"look {one.side}", boxed(one.label)))


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the files to ``out``. The held-out problems do not depend on ``seed``."""
    train, held_out = drawings()
    rng, fixed = random.Random(seed), random.Random(20)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "sft.jsonl", (demonstration(pair(train.draw, rng), rng) for _ in range(demonstrations)))
    problems = (pair(train.draw, rng) for _ in range(TRAIN))
    write(out / "train.jsonl", (row(one.asked, shown(one), label=one.label) for one in problems))
    kept = [pair(lambda rng: rng.choice(held_out), fixed) for _ in held_out]
    write_held_out(out, "pairs", [(one.asked, shown(one), one.label) for one in kept])


if __name__ == "__main__":
    data_command(__doc__, make_data)
