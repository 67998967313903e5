"""Tokenizers and processors of checkpoints, and images on their way to engines."""

from __future__ import annotations

import base64
import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from slime.utils import processing_utils
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
)
from tools.tiny_model import make_tokenizer


def picture(mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (2, 1))
    image.putpixel((1, 0), (10, 20, 30, 255)[: len(image.getbands())])
    return image


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def without_qwen_vl_utils(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)


def test_tokenizers_of_checkpoints(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert tokenizer.decode(tokenizer.encode("1 + 1", add_special_tokens=False)) == "1 + 1"
    assert load_processor(str(tmp_path), trust_remote_code=False) is None  # text only


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)no tokenizer could be loaded .*--hf-checkpoint must hold"):
        load_tokenizer(str(tmp_path))
    assert load_processor(str(tmp_path)) is None


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_images_arrive_in_rgb(mode):
    head, _, data = encode_image_for_rollout_engine(picture(mode)).partition(",")
    assert head == "data:image/png;base64"
    arrived = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert (arrived.format, arrived.mode, arrived.size) == ("PNG", "RGB", (2, 1))
    assert [arrived.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (10, 20, 30)]


def test_grey_images_become_rgb_too():
    grey = Image.new("L", (1, 1), 7)
    data = encode_image_for_rollout_engine(grey).partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) == (7, 7, 7)


def test_a_processor_returns_lists_for_text_and_tensors_for_the_rest():
    kwargs = build_processor_kwargs({"images": ["i"], "videos": None, "images_kwargs": {"do_resize": False}})
    assert (kwargs["images"], kwargs["videos"]) == (["i"], None)
    assert kwargs["text_kwargs"] == {"return_tensors": None, "return_token_type_ids": False}
    assert kwargs["images_kwargs"] == {"do_resize": False, "return_tensors": "pt"}
    assert kwargs["videos_kwargs"] == kwargs["audio_kwargs"] == {"return_tensors": "pt"}
    assert build_processor_kwargs() == build_processor_kwargs({}) == build_processor_kwargs(None)


def test_processor_arguments_leave_the_sample_alone():
    inputs = {"images": [1], "images_kwargs": {"a": 1}}
    build_processor_kwargs(inputs)
    assert inputs == {"images": [1], "images_kwargs": {"a": 1}}


@pytest.mark.usefixtures("without_qwen_vl_utils")
def test_images_of_messages_in_order(tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture()))
    data_url = "data:image/png;base64," + base64.b64encode(png(picture("RGBA"))).decode()
    ready = picture()
    path, raw = str(tmp_path / "a.png"), png(picture())
    forms = [path, f"file://{path}", data_url, raw, {"bytes": raw}]
    messages = [
        {"role": "system", "content": "text only"},
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": ready}]},
        {"role": "user", "content": [{"type": "image", "image": form} for form in forms]},
    ]
    found = process_vision_info(messages, processor=None)
    assert found["videos"] is None
    assert found["images"][0] is ready
    assert [(image.mode, image.getpixel((1, 0))) for image in found["images"]] == [("RGB", (10, 20, 30))] * 6


@pytest.mark.usefixtures("without_qwen_vl_utils")
def test_messages_without_images_and_with_videos():
    assert process_vision_info([{"role": "user", "content": "hi"}], None) == {"images": None, "videos": None}
    video = [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}]
    with pytest.raises(ImportError, match="pip install qwen-vl-utils"):
        process_vision_info(video, None)


def test_qwen_vl_utils_is_used_where_it_is_installed(monkeypatch):
    package = ModuleType("qwen_vl_utils")
    package.process_vision_info = lambda messages, image_patch_size: ([messages, image_patch_size], ["video"])
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", package)
    processor = SimpleNamespace(image_processor=SimpleNamespace(patch_size=16))
    messages = [{"role": "user", "content": "m"}]
    assert process_vision_info(messages, processor) == {"images": [messages, 16], "videos": ["video"]}
    assert processing_utils.process_vision_info(messages, None)["images"] == [messages, 14]
