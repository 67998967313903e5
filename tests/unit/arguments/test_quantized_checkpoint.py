from __future__ import annotations

import json

import pytest

from slime.arguments.errors import ArgumentError
from tests.support.arguments import CONFIG, dry, parse

NOT_YET = "not available yet in this version"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def make(path, quantization):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return str(path)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose engines cannot be sent weights."""
    return make(tmp_path / "model", {"quant_method": "fp8"})


def test_engines_of_fp8_in_blocks_are_sent_weights(tmp_path):
    path = make(tmp_path / "model", BLOCKS)
    assert parse("--hf-checkpoint", path).hf_checkpoint == path


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "fp8"}, {**BLOCKS, "activation_scheme": "static"}, {"quant_method": "compressed-tensors"}],
)
def test_engines_of_other_quantized_checkpoints_are_refused(tmp_path, quantization):
    """They rearrange their weights when they load them."""
    path, method = make(tmp_path / "model", quantization), quantization["quant_method"]
    with pytest.raises(ArgumentError, match=rf"{path} is quantized \({method}\): .* {NOT_YET}, only FP8 in blocks"):
        parse("--hf-checkpoint", path)


@pytest.mark.parametrize("loop", ["--debug-train-only", "--debug-rollout-only --rollout-num-gpus 1"])
def test_what_sends_no_weights_takes_one(checkpoint, loop):
    assert parse("--hf-checkpoint", checkpoint, *loop.split()).hf_checkpoint == checkpoint


@pytest.mark.parametrize(
    ("name", "quantised"),
    [("Tiny-FP8", False), ("Tiny-INT4", True), ("Tiny", False), ("Tiny-bf16", False)],
)
def test_a_checkpoint_that_is_not_there_says_it_by_its_name(name, quantised):
    args = dry("--hf-checkpoint", f"/nowhere/{name}")
    assert [NOT_YET in message for message in args.not_available] == [True] * quantised
