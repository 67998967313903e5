r"""Drawings of rectangles, and what is asked about them: the sides, as ``\boxed{34}``, width first.

Sides are one to four units long. A picture has 16 by 16 cells, of which a unit is three, and the rectangle stands
anywhere: there are 1444 drawings. Eight for each of the 16 pairs of sides are held out.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image, ImageDraw

from examples.quickstart.make_data import write
from slime.utils.processing_utils import encode_image_for_rollout_engine

SIDES, UNIT, CELLS = range(1, 5), 3, 16
HELD_OUT = 8
MODEL = (
    "--family", "qwen3_vl",
    "--hidden-size", "64", "--intermediate-size", "160", "--num-attention-heads", "4", "--num-key-value-heads", "2",
    "--vision", '{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, '
    '"deepstack_visual_indexes": [0, 1]}',
    "--min-pixels", "1024",
)  # fmt: skip
"""Words for ``tools.tiny_model`` for a model that learns to read them: a picture of 32 by 32 pixels is one token."""


class Drawing(NamedTuple):
    """Sides in units, left upper corner in cells."""

    width: int
    height: int
    left: int
    top: int

    @property
    def sides(self) -> str:
        """The label."""
        return f"{self.width}{self.height}"


class Drawings:
    """Drawings to draw from, which first draws sides: pairs of them are equally frequent."""

    def __init__(self, by_sides: list[list[Drawing]]) -> None:
        self.by_sides = by_sides

    def draw(self, rng: random.Random) -> Drawing:
        """Return one of them."""
        return rng.choice(rng.choice(self.by_sides))


def drawings() -> tuple[Drawings, list[Drawing]]:
    """Return those for training, and the held-out ones in the order of no rule; neither depends on a seed."""
    rng = random.Random(20)
    train, held_out = [], []
    for width in SIDES:
        for height in SIDES:
            places = [(x, y) for x in range(CELLS - UNIT * width + 1) for y in range(CELLS - UNIT * height + 1)]
            rng.shuffle(places)
            every = [Drawing(width, height, left, top) for left, top in places]
            held_out += every[:HELD_OUT]
            train.append(every[HELD_OUT:])
    rng.shuffle(held_out)
    return Drawings(train), held_out


def picture(*shown: Drawing, cell: int = 2) -> Image.Image:
    """Return drawings beside one another on a square picture; a cell has ``cell`` pixels a side."""
    size = CELLS * cell
    image = Image.new("RGB", (size * len(shown), size * len(shown)), "white")
    draw = ImageDraw.Draw(image)
    for number, one in enumerate(shown):
        left, top = size * number + cell * one.left, cell * one.top
        right, bottom = left + cell * UNIT * one.width, top + cell * UNIT * one.height
        draw.rectangle((left, top, right - 1, bottom - 1), fill="black")
    return image


def boxed(sides: str) -> str:
    """Return an answer as ``--rm-type math`` reads it."""
    return f"\\boxed{{{sides}}}"


def row(asked: str, *pictures: Image.Image, replies: tuple[str, ...] = (), label: str | None = None) -> dict[str, Any]:
    """Return a row of a file of prompts, or a conversation with ``replies``; every message of the user has a picture.

    ``asked`` is the text of the first.
    """
    messages = [{"role": "user", "content": "<image>" + asked}]
    for number, reply in enumerate(replies):
        messages += [{"role": "user", "content": "<image>"}] if number else []
        messages += [{"role": "assistant", "content": reply}]
    found = {"messages": messages, "images": [encode_image_for_rollout_engine(image) for image in pictures]}
    return found if label is None else {**found, "label": label}


def write_held_out(out: Path, name: str, problems: list[tuple[str, Image.Image, str]]) -> None:
    """Write a file of held-out ``problems`` (text, picture, label), and ``eval.yaml`` with it and the control.

    That is ``exchanged.jsonl``, in which each problem has the picture of the next one: a model that answers without
    looking does as well there.
    """
    seen = [image for _, image, _ in problems]
    files = []
    for kind, images in ((name, seen), ("exchanged", seen[1:] + seen[:1])):
        path = out / f"{kind}.jsonl"
        rows = ((asked, image, label) for (asked, _, label), image in zip(problems, images, strict=True))
        write(path, (row(asked, image, label=label) for asked, image, label in rows))
        files.append({"name": kind, "path": str(path)})
    (out / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": files}}, sort_keys=False))
