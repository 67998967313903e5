"""The vision tower in the memory plan: what it adds to the language model, by hand, for Qwen3-VL-8B."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import pytest

from slime.models.facts import known_config
from slime.preflight.plan.memory import memory
from slime.preflight.plan.memory_engine import engine_memory
from slime.preflight.plan.memory_text import memory_text
from slime.preflight.plan.memory_trainer import TrainerMemory, trainer_memory
from slime.preflight.plan.model_size import model_size
from tests.support.memory_args import published_args

NAME = "Qwen3-VL-8B-Instruct"
TOWER = 8_767_123_696 - 8_190_735_360
"""Parameters of Qwen3-VL-8B less those of Qwen3-8B, both as published: the language models are of the same shape."""
FLAGS = (
    *("--actor-num-gpus-per-node", 8, "--rollout-num-gpus", 8, "--rollout-num-gpus-per-engine", 2),
    *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 8192, "--rollout-max-response-len", 6144),
)
PROMPTS = ("--rollout-max-prompt-len", 2048)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
TRAINED = ("--train-vision-tower",)


def parsed(*flags: Any) -> Namespace:
    return published_args(NAME, *FLAGS, *flags)


def stages(args: Namespace, *, tower: bool = True) -> tuple[TrainerMemory, ...]:
    """Return the stages of the trainer, with the tower or of the language model alone."""
    config = known_config(NAME)
    assert config is not None
    if not tower:
        args, config = copy.copy(args), {}
    return trainer_memory(args, model_size(args, config))


def test_a_frozen_tower_is_parameters_of_the_first_stage_alone() -> None:
    args = parsed(*PROMPTS)
    (first, second), (bare, last) = stages(args), stages(args, tower=False)
    assert first.parameters - bare.parameters == 2 * TOWER  # in bf16, whole on both tensor-parallel ranks
    assert (first.gradients, first.optimizer) == (bare.gradients, bare.optimizer)
    assert second == last


def test_a_trained_tower_has_gradients_and_optimizer_state() -> None:
    (first, second), (bare, last) = stages(parsed(*PROMPTS, *TRAINED)), stages(parsed(*PROMPTS), tower=False)
    added = (first.parameters - bare.parameters) / 2
    assert TOWER <= added <= 1.0001 * TOWER  # Megatron's buffer pads small tensors
    assert first.gradients - bare.gradients == 4 * added
    assert first.optimizer - bare.optimizer == pytest.approx(12 * added / 2, abs=24)  # of two data-parallel ranks
    assert second == last


IMAGES = 2048
"""Of 8,192 tokens a quarter, that of 2,048 tokens of a prompt to a sample of 2,048 + 6,144."""
LAYER = 2 * (11 * 1152 + 2 * 4304) + 4 * 16 + 16


def test_features_of_inner_layers_wait_for_their_decoder_layers() -> None:
    args = parsed(*PROMPTS)
    (first, _), (bare, _) = stages(args), stages(args, tower=False)
    assert first.in_flight == 2
    assert first.activations - bare.activations == 2 * 3 * IMAGES * 2 * 4096
    pixels = 4 * 3 * 2 * 16 * 16
    assert first.recomputed == max(bare.recomputed, 4 * IMAGES * (pixels + LAYER))


@pytest.mark.parametrize(("recompute", "layer"), [((), LAYER), (FULL, 2 * 1152)])
def test_activations_of_a_trained_tower(recompute: tuple[Any, ...], layer: int) -> None:
    """Each layer's, those of four mergers, sines and cosines, and the pixels in bf16, for four patches a token."""
    args = parsed(*PROMPTS, *TRAINED, *recompute)
    (first, _), (bare, _) = stages(args), stages(args, tower=False)
    patch = 27 * layer + 2 * 1152 * (4 + 3 * 3) + 8 * 1152 // 16 + 2 * 1536
    assert first.activations - bare.activations == 2 * (3 * IMAGES * 2 * 4096 + 4 * IMAGES * patch)


def test_an_engine_holds_the_tower() -> None:
    """The trainer may have it or not."""
    args, config = parsed(), known_config(NAME)
    trained, bare = (model_size(args, c).shape for c in (config, {}))
    assert engine_memory(args, trained, config) == engine_memory(args, bare, config)
    with_tower, without = (engine_memory(args, bare, c) for c in (config, {}))
    whole = 1152 * (1536 + 2304)  # the embeddings of patches and positions, on both GPUs
    assert with_tower.weights - without.weights == 2 * (whole + (TOWER - whole) / 2)


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        (PROMPTS, "2,048 of the 8,192 tokens of a micro-batch are counted as those of images (by the lengths of "),
        (
            (),
            "8,192 of the 8,192 tokens of a micro-batch are counted as those of images (--rollout-max-prompt-len ",
        ),
    ],
)
def test_the_plan_says_how_many_tokens_are_those_of_images(flags: tuple[Any, ...], remark: str) -> None:
    args = parsed(*flags)
    assert [found for found in memory(args).remarks if found.startswith(remark)]
    text = " ".join(memory_text(args).split())
    assert "vision tower 0.58 B" in text
    assert "8.77 B parameters" in text


def test_a_tower_of_unknown_sizes_is_not_counted() -> None:
    args = parsed()
    size = model_size(args, {})
    assert size.total == 8_190_735_360
    assert "the vision tower is not counted: no config.json has its sizes" in size.shape.remarks
