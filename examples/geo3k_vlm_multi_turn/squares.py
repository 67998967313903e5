"""Count the red squares of a picture; ``look left`` and ``look right`` show one half of it, enlarged."""

from __future__ import annotations

import random
import re
from argparse import Namespace
from typing import Any

from PIL import Image, ImageDraw

from slime.rollout.rm_hub.answer_text import final_answer
from slime.utils.types import Sample

SIZE, CELL = 56, 14
COLORS = ("red", "blue", "green")
_LOOK = re.compile(r"look (left|right)")
_NUMBER = re.compile(r"\d+")


def picture(seed: int) -> tuple[Image.Image, int]:
    """Return a picture with one to four squares, and how many of them are red."""
    rng = random.Random(seed)
    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw = ImageDraw.Draw(image)
    cells = rng.sample([(x, y) for x in range(SIZE // CELL) for y in range(SIZE // CELL)], rng.randint(1, 4))
    colors = [rng.choice(COLORS) for _ in cells]
    for (x, y), color in zip(cells, colors, strict=True):
        draw.rectangle((x * CELL + 2, y * CELL + 2, (x + 1) * CELL - 3, (y + 1) * CELL - 3), fill=color)
    return image, colors.count("red")


class Squares:
    """A turn that does not look is the answer."""

    def __init__(self, sample: Sample) -> None:
        self.image: Image.Image = (sample.multimodal_inputs or {})["images"][0]

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """The picture is in the prompt."""
        return None, {}

    def step(self, text: str) -> tuple[Any, bool, dict[str, Any]]:
        """Return half of the picture, in its whole size, for a turn that looks."""
        found = _LOOK.search(text)
        if found is None:
            return None, True, {}
        width, height = self.image.size
        left = 0 if found[1] == "left" else width // 2
        half = self.image.crop((left, 0, left + width // 2, height))
        return half.resize((width, height), Image.Resampling.NEAREST), False, {}

    def format_observation(self, observation: Image.Image) -> dict[str, Any]:
        """Return a message with the picture in it."""
        image = {"type": "image", "image": observation}
        return {"role": "user", "content": [image, {"type": "text", "text": "How many red squares in all?"}]}

    def close(self) -> None:
        """There is nothing to release."""


def build_env(sample: Sample, args: Namespace) -> Squares:
    """Return the environment of one sample."""
    return Squares(sample)


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Return 1 when the last number of the answer is the label (``--custom-rm-path``)."""
    numbers = _NUMBER.findall(final_answer(sample.response))
    return float(bool(numbers) and numbers[-1] == str(sample.label))
