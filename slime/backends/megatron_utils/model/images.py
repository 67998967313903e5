"""Images in sequences: facts of a config, where their features go, and positions with their rotary embedding.

A position is three numbers, time, height and width (Qwen2-VL, arXiv 2409.12191). Text counts up in all three. The
tokens of an image have its time, row and column, counted from where it begins; text after it continues after the larger
of its sides.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime.arguments.args import Args
from slime.models import hf_fields

Grid = Sequence[int]
"""Patches of an image: in time, in height, in width."""


def merged(grid: Grid, merge: int) -> tuple[int, int, int]:
    """Return the grid of an image's tokens, each of ``merge`` x ``merge`` patches."""
    time, height, width = (int(size) for size in grid)
    return time, height // merge, width // merge


def num_tokens(grid: Grid, merge: int) -> int:
    """Return how many tokens an image takes."""
    time, height, width = merged(grid, merge)
    return time * height * width


def place_images(
    tokens: Tensor, lengths: Sequence[int], grids: Sequence[Grid], image_token: int, merge: int
) -> tuple[Tensor, Tensor]:
    """Return positions [3, t] of packed sequences ``tokens`` [t], and the feature [t] of each token, -1 for text.

    ``grids``: of all images, in the order of the tokens; features are numbered through them. Both are on the CPU.
    Raises ValueError if the tokens ``image_token`` are not those of the images.
    """
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(3, 1)
    features = torch.full((positions.size(1),), -1)
    where = (tokens.cpu() == image_token).nonzero().flatten().tolist()
    needed = sum(num_tokens(grid, merge) for grid in grids)
    if len(where) != needed:
        raise ValueError(f"{len(where)} image tokens, but the {len(grids)} images have {needed} features")
    ends = list(itertools.accumulate(lengths))
    taken = 0
    for grid in grids:
        time, height, width = merged(grid, merge)
        count = time * height * width
        start = where[taken]
        stop, end = start + count, next(end for end in ends if end > start)
        if where[taken + count - 1] != stop - 1 or stop > end:
            raise ValueError(f"the {count} image tokens of an image of {list(grid)} patches are not one run of them")
        inside = torch.meshgrid(torch.arange(time), torch.arange(height), torch.arange(width), indexing="ij")
        positions[:, start:stop] = positions[0, start] + torch.stack(inside).flatten(1)
        positions[:, stop:end] -= count - max(height, width)
        features[start:stop] = torch.arange(taken, taken + count)
        taken += count
    return positions, features


def distinct_images(pixels: Sequence[Tensor], grids: Sequence[Grid]) -> tuple[list[int], list[int]]:
    """Return which images are the first of their kind, and for each image the place of its like among these.

    Alike are images with the same grid and the same ``pixels``, number by number. Those of a group's samples are the
    same tensor, which is not read.
    """
    firsts: list[int] = []
    uses: list[int] = []
    places: dict[tuple[int, ...], list[int]] = {}
    for number, (image, grid) in enumerate(zip(pixels, grids, strict=True)):
        known = places.setdefault(tuple(grid), [])
        for place in known:
            like = pixels[firsts[place]]
            if like.data_ptr() == image.data_ptr() or torch.equal(like, image):
                break
        else:
            place = len(firsts)
            known.append(place)
            firsts.append(number)
        uses.append(place)
    return firsts, uses


def shared_features(grids: Sequence[Grid], uses: Sequence[int], merge: int) -> tuple[list[Grid], Tensor]:
    """Return the grids of distinct images, and the feature of these for every feature of all images.

    ``uses``: of ``distinct_images``.
    """
    shown: list[Grid] = []
    starts: list[int] = []
    found, end = [torch.zeros(0, dtype=torch.long)], 0
    for place, grid in zip(uses, grids, strict=True):
        count = num_tokens(grid, merge)
        if place == len(shown):
            shown.append(grid)
            starts.append(end)
            end += count
        found.append(torch.arange(starts[place], starts[place] + count))
    return shown, torch.cat(found)


@dataclass(frozen=True)
class Images:
    """Facts about images of a ``config.json``; ``deepstack``: how many decoder layers get features of inner layers.

    ``placeholders``: the token of images, and that of videos.
    """

    token: int
    placeholders: tuple[int, ...]
    merge: int
    patch_numbers: int
    deepstack: int
    sections: tuple[int, ...]
    rope_base: float
    rotated: float


def images_of(args: Args) -> Images:
    """Return what ``--hf-checkpoint`` says about images. Raises ValueError if that is not a vision-language model's."""
    path = Path(args.hf_checkpoint) / "config.json"
    config = hf_fields.text_part(json.loads(path.read_text()))
    vision, sections = config.get("vision_config"), hf_fields.mrope_section(config)
    token, base = config.get("image_token_id"), hf_fields.rope_theta(config)
    if not isinstance(vision, dict) or sections is None or token is None or base is None:
        raise ValueError(
            f"{path} is not that of a vision-language model: it needs vision_config, image_token_id, rope_theta and an "
            "mrope_section"
        )
    patch = vision.get("in_channels", vision.get("in_chans", 3)) * vision.get("temporal_patch_size", 2)
    return Images(
        token=int(token),
        placeholders=tuple(int(config[key]) for key in ("image_token_id", "video_token_id") if config.get(key)),
        merge=int(vision.get("spatial_merge_size", 2)),
        patch_numbers=patch * vision["patch_size"] ** 2,
        deepstack=hf_fields.deepstack_layers(config),
        sections=tuple(sections),
        rope_base=float(base),
        rotated=hf_fields.partial_rotary_factor(config) or 1.0,
    )


class MultimodalRotaryEmbedding(torch.nn.Module):
    """Angles of packed sequences, one row for every token, as megatron's rotation of them takes it.

    ``sections``: how many frequencies turn with time, height and width. Qwen2.5-VL gives each a block of frequencies,
    Qwen3-VL, where ``interleaved``, lets them take turns (t h w t h w ... t t).
    """

    def __init__(self, dim: int, base: float, sections: Sequence[int], *, interleaved: bool) -> None:
        super().__init__()
        if sum(sections) != dim // 2:
            raise ValueError(f"mrope_section {list(sections)} does not divide {dim // 2} frequencies")
        self.dim, self.base = dim, base
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        if interleaved:
            axes = torch.zeros(dim // 2, dtype=torch.long)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        self.axes = axes.tolist()

    def forward(self, positions: Tensor, *_: object, **__: object) -> Tensor:
        """Return the angles [t, 1, 1, dim] at ``positions`` [3, t], in fp32."""
        # Not a buffer: in bf16 models these would be rounded.
        steps = torch.arange(0, self.dim, 2, dtype=torch.int64, device=positions.device).float()
        angles = positions[self.axes].t().float() * (1.0 / self.base ** (steps / self.dim))
        return torch.cat([angles, angles], -1)[:, None, None]
