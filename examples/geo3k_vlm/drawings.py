r"""Drawings of rectangles on squared paper, and what is asked about them: the sides, as ``\boxed{35}``.

The paper has 8 by 8 squares; a rectangle has sides of two to seven of them and stands anywhere, at whole and at half
squares. Of the 2304 drawings 256 are held out.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image, ImageDraw

from examples.quickstart.make_data import write
from slime.utils.processing_utils import encode_image_for_rollout_engine

PAPER, SIDES = 8, range(2, 8)
HELD_OUT = 256
UNIT = 4
"""Pixels of a square: a drawing is one token of a model with patches of 16 pixels, four of which are merged."""
MODEL = (
    "--family", "qwen3_vl",
    "--hidden-size", "64", "--intermediate-size", "160", "--num-attention-heads", "4", "--num-key-value-heads", "2",
    "--vision", '{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, '
    '"deepstack_visual_indexes": [0, 1]}',
    "--min-pixels", "1024",
)  # fmt: skip
"""What ``tools.tiny_model`` is told of a model that learns to read them."""


class Drawing(NamedTuple):
    """Sides in squares, left upper corner in half squares."""

    width: int
    height: int
    left: int
    top: int

    @property
    def sides(self) -> str:
        """The label: width and height."""
        return f"{self.width}{self.height}"


def drawings() -> tuple[list[Drawing], list[Drawing]]:
    """Return those for training, and the held-out ones, which do not depend on any seed."""
    every = [
        Drawing(width, height, left, top)
        for width in SIDES
        for height in SIDES
        for left in range(2 * (PAPER - width) + 1)
        for top in range(2 * (PAPER - height) + 1)
    ]
    random.Random(20).shuffle(every)
    return every[HELD_OUT:], every[:HELD_OUT]


def picture(*shown: Drawing, unit: int = UNIT) -> Image.Image:
    """Return drawings beside one another, each on paper of ``8 * unit`` pixels, on a square picture."""
    size = PAPER * unit * len(shown)
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    for number, one in enumerate(shown):
        left, top = number * PAPER * unit + one.left * unit // 2, one.top * unit // 2
        draw.rectangle((left, top, left + one.width * unit - 1, top + one.height * unit - 1), fill="black")
    return image


def boxed(sides: str) -> str:
    """Return an answer as ``--rm-type math`` reads it."""
    return f"\\boxed{{{sides}}}"


def guess(rng: random.Random) -> str:
    """Return the sides of no drawing in particular."""
    return f"{rng.choice(SIDES)}{rng.choice(SIDES)}"


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
