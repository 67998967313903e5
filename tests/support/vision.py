"""A tokenizer and a processor of images as Qwen's are, small: one character a token, one token for 28 x 28 pixels."""

from __future__ import annotations

from typing import Any

import torch
from PIL import ImageStat

from tests.support.agents import BEGIN, END, ToolTokenizer

PAD = "\ue002"
PATCH = 28


class VisionTokenizer(ToolTokenizer):
    """Images of a message are written as ``<PAD>``."""

    def convert_tokens_to_ids(self, token: str) -> int:
        return ord(token)

    def apply_chat_template(self, messages: Any, *, tools: Any = None, tokenize: bool = False,
                            add_generation_prompt: bool = False) -> str:  # fmt: skip
        text = "".join(f"{BEGIN}{message['role']}\n{written(message['content'])}{END}\n" for message in messages)
        return text + (f"{BEGIN}assistant\n" if add_generation_prompt else "")


def written(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(f"<{PAD}>" if part["type"] == "image" else part["text"] for part in content)


def tokens_of(image: Any) -> int:
    width, height = (side // PATCH for side in image.size)
    return int(width * height)


class Processor:
    """Repeats the pad of each image, and makes a row of pixels for each token."""

    image_token = PAD

    def __call__(self, text: str, images: Any = None, videos: Any = None, **kwargs: Any) -> dict[str, Any]:
        assert kwargs["images_kwargs"]["return_tensors"] == "pt"
        assert images is None or len(images) > 0  # as transformers' processors
        images = list(images or [])
        assert text.count(PAD) == len(images)
        pieces, rows, grids = text.split(PAD), [], []
        expanded = pieces[0]
        for image, piece in zip(images, pieces[1:], strict=True):
            width, height = (side // PATCH for side in image.size)
            count = tokens_of(image)
            rows.append(torch.tensor(ImageStat.Stat(image).mean).repeat(count, 1))
            grids.append([1, height, width])
            expanded += PAD * count + piece
        found = {"input_ids": [[ord(c) for c in expanded]], "attention_mask": [[1] * len(expanded)]}
        return found | ({"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor(grids)} if rows else {})
