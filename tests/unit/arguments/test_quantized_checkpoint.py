from __future__ import annotations

import json

import pytest

from slime.arguments.errors import ArgumentError
from tests.support.arguments import CONFIG, dry, parse

NOT_YET = "not available yet in this version"


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint like those with which engines serve FP8."""
    path = tmp_path / "model"
    path.mkdir()
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": block}))
    return str(path)


def test_engines_of_a_quantised_checkpoint_are_refused(checkpoint):
    """They would be sent bf16 weights, and would take them for FP8."""
    with pytest.raises(ArgumentError, match=rf"{checkpoint} is quantized \(fp8\): .* are {NOT_YET}; give a bf16"):
        parse("--hf-checkpoint", checkpoint)


@pytest.mark.parametrize("loop", ["--debug-train-only", "--debug-rollout-only --rollout-num-gpus 1"])
def test_what_sends_no_weights_takes_one(checkpoint, loop):
    assert parse("--hf-checkpoint", checkpoint, *loop.split()).hf_checkpoint == checkpoint


@pytest.mark.parametrize(
    ("name", "quantised"),
    [("Tiny-FP8", True), ("Tiny-INT4", True), ("Tiny", False), ("Tiny-bf16", False)],
)
def test_a_checkpoint_that_is_not_there_says_it_by_its_name(name, quantised):
    args = dry("--hf-checkpoint", f"/nowhere/{name}")
    assert [NOT_YET in message for message in args.not_available] == [True] * quantised
