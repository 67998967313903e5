"""Supervised fine-tuning on conversations with images, and how long prompts with images are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.rollout import sft_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.data import Dataset
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    expanded_length,
    load_processor,
    load_tokenizer,
)
from tests.support.rollout_args import rollout_args
from tests.support.vision_models import drawing
from tools.tiny_model import IMAGE, make_processor_files

PICTURES = [drawing(1, 64, 64), drawing(2, 96, 64), drawing(3, 300, 500)]
URLS = [encode_image_for_rollout_engine(image) for image in PICTURES]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_processor_files(folder, request.param)
    return folder


def rows() -> list[dict[str, Any]]:
    """Images in a column, in parts of later turns, and none."""
    part = {"type": "image_url", "image_url": {"url": URLS[1]}}
    return [
        {
            "messages": [
                {"role": "user", "content": "what is <image> and <image>?"},
                {"role": "assistant", "content": "a square"},
                {"role": "user", "content": [{"type": "text", "text": "and "}, part]},
                {"role": "assistant", "content": "a line"},
            ],
            "images": [URLS[0], URLS[2]],
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    ]


def write(path: Path, given: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


@pytest.mark.parametrize("mask_type", ["qwen", "qwen3", "qwen3_5"])
def test_conversations_with_images(checkpoint, mask_type, tmp_path):
    args = rollout_args(
        prompt_data=write(tmp_path / "sft.jsonl", rows()), hf_checkpoint=str(checkpoint), input_key="messages",
        label_key=None, n_samples_per_prompt=1, rollout_batch_size=2, multimodal_keys={"image": "images"},
    )  # fmt: skip
    args.loss_mask_type, args.loss_type = mask_type, "sft_loss"
    source = RolloutDataSourceWithBuffer(args)
    first, second = iter_samples(sft_rollout.generate_rollout(args, 0, source).samples)
    processor, tokenizer = load_processor(str(checkpoint)), load_tokenizer(str(checkpoint))
    shown = [PICTURES[0], PICTURES[2], PICTURES[1]]
    expected = processor(
        text="<|im_start|>user\nwhat is <|vision_start|><|image_pad|><|vision_end|> and "
        "<|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\na square<|im_end|>\n"
        "<|im_start|>user\nand <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\na line<|im_end|>\n",
        **build_processor_kwargs({"images": shown}),
    )
    assert first.tokens == list(expected["input_ids"][0])
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(first.multimodal_train_inputs[name], expected[name])
    assert first.multimodal_train_inputs.keys() == {"pixel_values", "image_grid_thw"}
    cut = len(first.tokens) - first.response_length
    on = [t for t, trained in zip(first.tokens[cut:], first.loss_mask, strict=True) if trained]
    assert tokenizer.decode(on) == "a square<|im_end|>\na line<|im_end|>\n"
    assert (second.multimodal_train_inputs, second.loss_mask) == (None, [1] * 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "<image>"}], "images": []}, "more <image> placeholders"),
        ({"messages": [{"role": "user", "content": "?"}], "images": [URLS[0]]}, "1 more media items than <image>"),
        ({"messages": [{"role": "user", "content": f"<image>{IMAGE}"}], "images": [URLS[0]]},
         r"the prompt has 1 images, and 2 times <\|image_pad\|>"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "media cannot be read"),
    ],
)  # fmt: skip
def test_rows_whose_text_and_images_differ(checkpoint, tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", [rows()[1], row])
    reader = load_tokenizer(str(checkpoint)), load_processor(str(checkpoint))
    with pytest.raises((ValueError, AssertionError), match=rf"rows\.jsonl line 2: .*{message}"):
        Dataset(
            path, *reader, None, prompt_key="messages", multimodal_keys={"image": "images"}, apply_chat_template=True
        )


def test_a_checkpoint_that_reads_no_images(checkpoint, tmp_path):
    path = write(tmp_path / "rows.jsonl", rows())
    with pytest.raises(ValueError, match="its media need a processor, and the checkpoint has none"):
        Dataset(
            path, load_tokenizer(str(checkpoint)), None, None, prompt_key="messages", multimodal_keys={"image": "i"}
        )


def test_lengths_are_those_of_the_processor(checkpoint):
    processor, tokenizer = load_processor(str(checkpoint)), load_tokenizer(str(checkpoint))
    for images in ([PICTURES[0]], PICTURES, [drawing(7, 5, 900), drawing(8, 33, 31)]):
        text = " and ".join([f"<|vision_start|>{IMAGE}<|vision_end|>"] * len(images)) + " x y"
        whole = processor(text=text, **build_processor_kwargs({"images": images}))
        assert expanded_length(processor, tokenizer, text, {"images": images, "videos": None}) == len(
            whole["input_ids"][0]
        )


def test_long_prompts_are_dropped(checkpoint, tmp_path):
    path = write(tmp_path / "rows.jsonl", rows())
    reader = load_tokenizer(str(checkpoint)), load_processor(str(checkpoint))
    keys = {"prompt_key": "messages", "multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    whole = Dataset(path, *reader, None, **keys)
    ids = reader[1](text=whole[0].prompt, **build_processor_kwargs(whole[0].multimodal_inputs))["input_ids"][0]
    assert len(Dataset(path, *reader, len(ids), **keys)) == 2
    assert len(Dataset(path, *reader, len(ids) - 1, **keys)) == 1
