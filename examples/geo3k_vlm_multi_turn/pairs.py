"""Two drawings in one picture, and the sides of one of them: ``look left`` and ``look right`` show one, enlarged."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from PIL import Image

from slime.utils.types import Sample

_LOOK = re.compile(r"look (left|right)")


def look(pair: Image.Image, side: str) -> Image.Image:
    """Return one drawing of a picture of two, in the size of the picture."""
    size, _ = pair.size
    left = 0 if side == "left" else size // 2
    return pair.crop((left, 0, left + size // 2, size // 2)).resize(pair.size, Image.Resampling.NEAREST)


class Pairs:
    """A turn that does not look is the answer."""

    def __init__(self, sample: Sample) -> None:
        self.image: Image.Image = (sample.multimodal_inputs or {})["images"][0]

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """The picture is in the prompt."""
        return None, {}

    def step(self, text: str) -> tuple[Any, bool, dict[str, Any]]:
        """Return the drawing that a turn looks at."""
        found = _LOOK.search(text)
        return (None, True, {}) if found is None else (look(self.image, found[1]), False, {})

    def format_observation(self, observation: Image.Image) -> dict[str, Any]:
        """Return a message that is a picture."""
        return {"role": "user", "content": [{"type": "image", "image": observation}]}

    def close(self) -> None:
        """There is nothing to release."""


def build_env(sample: Sample, args: Namespace) -> Pairs:
    """Return the environment of one sample."""
    return Pairs(sample)
