"""Processors of vision-language checkpoints, also without torchvision, and what trainers get of their outputs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from slime.utils.processing_utils import build_processor_kwargs, load_processor, load_tokenizer, train_inputs
from tests.support.vision_models import drawing
from tools.tiny_model import END, IMAGE, START, make_processor_files

PATCHES = {"qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen2_5_vl": 14, "qwen3_5": 16}


@pytest.fixture(scope="module", params=PATCHES)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_processor_files(folder, request.param)
    return SimpleNamespace(
        processor=load_processor(str(folder)), tokenizer=load_tokenizer(str(folder)), patch=PATCHES[request.param]
    )


def patches(image: Image.Image, size: int) -> np.ndarray:
    """The patches of an image that is not resized, as the models' papers have them: 2 x 2 merged ones are neighbors."""
    values = (np.asarray(image, dtype=np.float64) / 255 - 0.5) / 0.5
    height, width = (side // size for side in values.shape[:2])
    rows = []
    for y, x in ((y, x) for y in range(0, height, 2) for x in range(0, width, 2)):
        for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
            top, left = (y + dy) * size, (x + dx) * size
            patch = values[top : top + size, left : left + size].transpose(2, 0, 1)
            rows.append(np.stack([patch, patch], axis=1).reshape(-1))  # the same picture twice in time
    return np.stack(rows)


def test_ids_and_pixels(loaded):
    size = loaded.patch
    images = [drawing(1, 4 * size, 6 * size), drawing(2, 8 * size, 4 * size)]
    text = f"a{START}{IMAGE}{END}b{START}{IMAGE}{END}"
    outputs = loaded.processor(text=text, **build_processor_kwargs({"images": images}))
    made = train_inputs(outputs)
    assert made.keys() == {"pixel_values", "image_grid_thw"}  # no mm_token_type_ids
    assert made["image_grid_thw"].dtype == torch.int64
    assert made["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 8]]
    expected = np.concatenate([patches(image, size) for image in images])
    assert made["pixel_values"].dtype == torch.float32
    np.testing.assert_allclose(made["pixel_values"].numpy(), expected, atol=1e-6)
    start, image, end = loaded.tokenizer.convert_tokens_to_ids([START, IMAGE, END])
    a, b = loaded.tokenizer.encode("ab")
    assert outputs["input_ids"] == [[a, start, *[image] * 6, end, b, start, *[image] * 8, end]]


def test_large_and_small_images_are_resized(loaded):
    for image in (drawing(3, 900, 300), drawing(4, 20, 10)):
        outputs = loaded.processor(text=f"{START}{IMAGE}{END}", **build_processor_kwargs({"images": [image]}))
        _, height, width = outputs["image_grid_thw"][0].tolist()
        size = loaded.patch
        assert 56 * 56 <= height * width * size**2 <= 160 * 160
        assert height % 2 == width % 2 == 0
        assert len(outputs["pixel_values"]) == height * width


def test_text_alone(loaded):
    assert train_inputs(loaded.processor(text="no picture", **build_processor_kwargs())) == {}


def test_the_processor_can_be_saved(loaded, tmp_path):
    loaded.processor.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "processor_config.json").read_text())
    assert written["image_processor"]["patch_size"] == loaded.patch
