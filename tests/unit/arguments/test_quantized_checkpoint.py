from __future__ import annotations

import json

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.quantization import FAKE_INT4, GROUP_SIZE
from tests.support.arguments import CONFIG, dry, parse

NOT_YET = "not available yet in this version"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(weights, **others):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, **others}


def make(path, quantization):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    return str(path)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose engines cannot be sent weights."""
    return make(tmp_path / "model", {"quant_method": "awq"})


@pytest.mark.parametrize(
    "quantization", [BLOCKS, {"quant_method": "fp8"}, compressed(INT4), compressed({**INT4, "symmetric": False})]
)
def test_engines_of_these_checkpoints_are_sent_weights(tmp_path, quantization):
    path = make(tmp_path / "model", quantization)
    assert parse("--hf-checkpoint", path).hf_checkpoint == path


@pytest.mark.parametrize(
    "quantization",
    [
        {**BLOCKS, "activation_scheme": "static"},
        {"quant_method": "compressed-tensors"},
        compressed({**INT4, "num_bits": 8}),
        compressed({**INT4, "actorder": "group"}),
        compressed({"type": "float", "num_bits": 8, "strategy": "channel"}),
    ],
)
def test_engines_of_other_quantized_checkpoints_are_refused(tmp_path, quantization):
    path, method = make(tmp_path / "model", quantization), quantization["quant_method"]
    with pytest.raises(ArgumentError, match=rf"{path} is quantized \({method}\): .* {NOT_YET}, only FP8 \(e4m3"):
        parse("--hf-checkpoint", path)


@pytest.mark.parametrize("loop", ["--debug-train-only", "--debug-rollout-only --rollout-num-gpus 1"])
def test_what_sends_no_weights_takes_one(checkpoint, loop):
    assert parse("--hf-checkpoint", checkpoint, *loop.split()).hf_checkpoint == checkpoint


@pytest.mark.parametrize("name", ["Tiny-FP8", "Tiny-INT4", "Tiny", "Tiny-bf16"])
def test_a_checkpoint_that_is_not_there_says_it_by_its_name(name):
    assert not any(NOT_YET in message for message in dry("--hf-checkpoint", f"/nowhere/{name}").not_available)


def variables(**values):
    return "--train-env-vars", json.dumps(values)


def test_rounded_weights_are_those_of_the_checkpoint(tmp_path):
    path = make(tmp_path / "model", compressed(INT4))
    args = parse("--hf-checkpoint", path, *variables(**{FAKE_INT4: "1", GROUP_SIZE: "32"}))
    assert args.quantization_aware_training
    assert args.int4_group_size == 32
    assert parse("--hf-checkpoint", path, "--quantization-aware-training").quantization_aware_training
    assert not parse("--hf-checkpoint", path, *variables(**{FAKE_INT4: "0"})).quantization_aware_training


def test_the_variable_rounds_experts_of_a_checkpoint_that_is_not_quantized():
    args = parse(*variables(**{FAKE_INT4: "1"}))
    assert args.quantization_aware_training
    assert args.int4_group_size == 128


@pytest.mark.parametrize(
    ("quantization", "words", "message"),
    [
        (compressed(INT4), variables(**{FAKE_INT4: "1"}), "128: .* compressed-tensors with groups of 32"),
        (BLOCKS, variables(**{FAKE_INT4: "1", GROUP_SIZE: "32"}), "quantized in fp8 with groups of None"),
        (compressed(INT4), variables(**{FAKE_INT4: "1", GROUP_SIZE: "no"}), f"{GROUP_SIZE} no: expected a number"),
        (None, ("--quantization-aware-training",), "is not quantized; give a quantized one there"),
        (BLOCKS, ("--quantization-aware-training", "--lora-rank", "8"), "add adapters .* to rounded weights"),
    ],
)
def test_what_cannot_be_rounded_as_asked_is_refused(tmp_path, quantization, words, message):
    path = make(tmp_path / "model", quantization)
    with pytest.raises(ArgumentError, match=message):
        parse("--hf-checkpoint", path, *words)
