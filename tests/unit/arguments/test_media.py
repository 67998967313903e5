"""--multimodal-keys: images alone, of a checkpoint that sees, prepared alike for engines and trainers."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.data import check_media
from tests.support.arguments import run_args


def checked(tmp_path: Path, keys: dict[str, str] | None, *, sees: bool = True, **values: Any) -> Namespace:
    config = {"model_type": "qwen3_vl", **({"vision_config": {}} if sees else {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = run_args(multimodal_keys=keys, hf_checkpoint=str(tmp_path), **values)
    args.eval_datasets = values.get("eval_datasets") or []
    args.warnings = []
    check_media(args)
    return args


def test_images_are_available(tmp_path):
    checked(tmp_path, {"image": "images"})
    checked(tmp_path, None, sees=False)


@pytest.mark.parametrize("keys", [{"video": "videos"}, {"image": "images", "audio": "a"}])
def test_other_media_are_not(keys, tmp_path):
    kind = (keys.keys() - {"image"}).pop()
    with pytest.raises(ArgumentError, match=f"--multimodal-keys: {kind} is not available yet; images are"):
        checked(tmp_path, keys)
    with pytest.raises(ArgumentError, match=f"{kind} is not available yet"):
        checked(tmp_path, {"image": "i"}, eval_datasets=[SimpleNamespace(multimodal_keys=keys)])


def test_a_checkpoint_that_does_not_see(tmp_path):
    with pytest.raises(ArgumentError, match=r"does not see: its config\.json has no vision_config"):
        checked(tmp_path, {"image": "images"}, sees=False)


def test_pixels_are_those_of_pil_by_default(tmp_path):
    args = checked(tmp_path, {"image": "images"}, sglang_image_processor_backend="auto")
    assert (args.sglang_image_processor_backend, args.warnings) == ("pil", [])
    args = checked(tmp_path, None, sglang_image_processor_backend="auto")
    assert args.sglang_image_processor_backend == "auto"  # text alone: as SGLang has it
    [said] = checked(tmp_path, {"image": "images"}, sglang_image_processor_backend="torchvision").warnings
    assert said.endswith("which may differ a little; pil makes the same of both")
