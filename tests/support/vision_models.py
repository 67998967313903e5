"""Tiny random vision-language checkpoints with their processor files, drawn images, and transformers' log-probs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file

from slime.utils.processing_utils import encode_image_for_rollout_engine
from tools.tiny_model import make_tiny_checkpoint

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5")


def make_vision_checkpoint(folder: Path, family: str, *, seed: int = 11, tower_seed: int | None = None) -> Path:
    """Write a checkpoint of ``family``, with values by ``seed``; the tower's by ``tower_seed``, if given."""
    path = make_tiny_checkpoint(folder, family, intermediate_size=96) / "model.safetensors"
    tensors = load_file(path)
    tower = {name: tensor for name, tensor in tensors.items() if "visual." in name}
    for part, number in ((tensors, seed), (tower, tower_seed)):
        if number is not None:
            tensors |= _filled(part, number)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _filled(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return values that are not those that training begins with."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        found[name] = tensor + 0.1 * noise if tensor.ndim == 1 and "A_log" not in name else 0.08 * noise
    return found


def drawing(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Return a picture of rectangles, other ones for every seed."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = rng.randrange(width), rng.randrange(height)
        box = (left, top, left + rng.randrange(4, 30), top + rng.randrange(4, 30))
        draw.rectangle(box, fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


def pictures_of_row(row: int) -> list[Image.Image]:
    """Return no, one or two pictures, of different sizes, for a row of a file of prompts."""
    sizes = ((64, 64), (96, 64), (130, 70))
    return [drawing(10 * row + k, *sizes[(row + k) % 3]) for k in range(row % 3)]


def with_pictures(prompts: Path) -> Path:
    """Give every row of a file of ``prompts`` its pictures, in the column ``images``."""
    rows = []
    for number, row in enumerate(map(json.loads, prompts.read_text().splitlines())):
        images = pictures_of_row(number)
        (message,) = row["prompt"]
        message["content"] = "<image>" * len(images) + message["content"]
        rows.append({**row, "images": [encode_image_for_rollout_engine(image) for image in images]})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts


class VisionReference:
    """Log-probs of a checkpoint by transformers, with attention in plain torch."""

    def __init__(self, checkpoint: Path, exact: Any = None) -> None:
        from transformers import AutoModelForImageTextToText

        loaded = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model = loaded if exact is None else exact(loaded)
        self.image_id = int(loaded.config.image_token_id)
        self.forbidden = [self.image_id, int(loaded.config.video_token_id)]

    def log_probs(self, prompt: list[int], output: list[int], images: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return ``[len(output)]``, without placeholders; ``prompt`` is expanded, ``images`` are pixels and grids."""
        return self._table(prompt, output, images).gather(1, torch.tensor(output)[:, None])[:, 0]

    def are_best(self, prompt: list[int], output: list[int], images: dict[str, torch.Tensor]) -> bool:
        """Return True if each output token is the likeliest one given what is before it."""
        return bool((self._table(prompt, output, images).argmax(-1) == torch.tensor(output)).all())

    def _table(self, prompt: list[int], output: list[int], images: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.tensor([prompt + output])
        kinds = {"mm_token_type_ids": (ids == self.image_id).int()} if images else {}
        with torch.no_grad():
            logits = self.model(ids, **images, **kinds, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits[:, self.forbidden] = -torch.inf
        return torch.log_softmax(logits.float(), -1)
