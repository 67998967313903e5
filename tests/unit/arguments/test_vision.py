"""Flags of vision-language models: the layers that a tower's features enter, and what needs a tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.arguments.rules import vision
from slime.models import hf_fields
from slime.models.shape import shape_of
from tests.support.arguments import run_args

SPEC = ["slime_plugins.models.qwen3_vl", "get_qwen3_vl_model_provider"]
WHOLE = {
    "model_type": "qwen3_vl",
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24]},
    "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 8},
}
QWEN3_5 = {"model_type": "qwen3_5", "vision_config": {}, "text_config": {"model_type": "qwen3_5_text"}}
PP2 = {"pipeline_model_parallel_size": 2}


def check(tmp_path: Path, config: dict[str, Any], **values: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    vision.check(run_args(**{"num_layers": 8, "spec": SPEC, "hf_checkpoint": str(tmp_path), **values}))


def test_layers_that_features_enter() -> None:
    assert hf_fields.deepstack_layers(WHOLE) == 3
    assert hf_fields.deepstack_layers(hf_fields.text_part(WHOLE)) == 3
    assert hf_fields.deepstack_layers(QWEN3_5) == 0


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ({}, None),
        (PP2, None),
        ({"pipeline_model_parallel_size": 4}, 2),
        ({**PP2, "virtual_pipeline_model_parallel_size": 2}, 2),
        ({**PP2, "decoder_first_pipeline_num_layers": 3}, None),
        ({**PP2, "decoder_first_pipeline_num_layers": 1}, 1),
        ({**PP2, "pipeline_model_parallel_layout": "E|t*8,L"}, 0),
    ],
)
def test_the_first_stage_has_the_layers_that_features_enter(
    layout: dict[str, Any], layers: int | None, tmp_path: Path
) -> None:
    if layers is None:
        check(tmp_path, WHOLE, **layout)
        return
    with pytest.raises(ArgumentError, match=f"the first pipeline stage has {layers} layers, .*enter the first 3 lay"):
        check(tmp_path, WHOLE, **layout)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1: MTP layers of vision-language models are not supported"),
        ({"train_vision_tower": True, "lora_rank": 8}, "--train-vision-tower: --lora-rank freezes the whole model"),
        ({"train_vision_tower": True, "update_weight_transport": "p2p"}, "--update-weight-transport p2p was never"),
    ],
)
def test_what_a_vision_language_model_does_not_do(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        check(tmp_path, WHOLE, **values)


LANGUAGE = ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]
TEXT = {"model_type": "qwen3", "num_hidden_layers": 8}


@pytest.mark.parametrize(
    ("values", "option"),
    [({"train_vision_tower": True}, "--train-vision-tower"), ({"multimodal_keys": {"image": "x"}}, "--multimodal")],
)
def test_images_need_a_model_with_a_tower(values: dict[str, Any], option: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{option}.*: .* describes no model with a vision tower; leave it out"):
        check(tmp_path, TEXT, spec=None, **values)
    with pytest.raises(
        ArgumentError, match=f"{option}.*: .*; give --spec slime_plugins.models.qwen3_5_vl get_qwen3_5_v"
    ):
        check(tmp_path, QWEN3_5, spec=LANGUAGE, **values)
    check(tmp_path, QWEN3_5, spec=["slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider"], **values)
    check(tmp_path, TEXT, spec=["mine", "layers"], **values)
    check(tmp_path, TEXT, spec=None, custom_model_provider_path="mine.provider", **values)


def test_a_language_model_is_left_alone(tmp_path: Path) -> None:
    check(tmp_path, TEXT, spec=None, pipeline_model_parallel_size=8)
    check(tmp_path, QWEN3_5, spec=LANGUAGE, mtp_num_layers=1)


def test_the_plan_says_that_a_tower_of_unknown_sizes_is_not_counted() -> None:
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    remark = "the vision tower is not counted: no config.json has its sizes"
    assert shape_of(run_args(spec=SPEC, **sizes)).remarks == (remark,)
    assert shape_of(run_args(spec=None, **sizes)).remarks == ()
