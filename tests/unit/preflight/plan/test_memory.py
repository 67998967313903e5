"""Memory of trainer and engine: closed forms, properties, and what is known from real runs."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.facts import models
from slime.models.shape import LayerKind, shape_of
from slime.preflight.plan.memory import CAPACITIES, memory
from slime.preflight.plan.memory_engine import EngineMemory, engine_memory, weight_format
from slime.preflight.plan.memory_text import fit_sentence, memory_text, warning_of_this_machine
from slime.preflight.plan.memory_trainer import (
    CONTEXT,
    Kept,
    TrainerMemory,
    _in_flight,
    layer_bytes,
    micro_batch_tokens,
    spared,
    state_bytes,
    trainer_memory,
)
from slime.preflight.plan.model_size import Parallel, model_size
from tests.support.memory_args import bare_args, published_args

GIB = 2**30
COLOCATED = ("--colocate", "--rollout-max-response-len", 8192)
DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", 9216)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)


def of_trainer(args: Namespace) -> TrainerMemory:
    """The pipeline stage that needs most."""
    return max(trainer_memory(args, model_size(args)), key=lambda stage: stage.total)


def test_a_trainer_of_an_evaluation_has_parameters_alone() -> None:
    flags = {"num_layers": 2, "micro_batch_size": 1, "rollout_max_context_len": 200, "actor_num_gpus_per_node": 2}
    trains, evaluates = (of_trainer(bare_args(**flags, num_rollout=n, kl_coef=0.1)) for n in (8, 0))
    assert evaluates.parameters == trains.parameters > 0
    assert evaluates.static == evaluates.step == evaluates.parameters + CONTEXT
    assert evaluates.host == 0 < trains.host
    assert evaluates.transfer == trains.transfer


def test_bytes_of_a_trainer_by_hand() -> None:
    """A model whose tensors need no padding, on 2 data-parallel ranks, micro-batches of 256 tokens, vocabulary 1024."""
    args = bare_args(num_layers=2, micro_batch_size=1, rollout_max_context_len=200, actor_num_gpus_per_node=2)
    layer = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 160 + 2 * 64
    parameters = 2 * layer + 64 + 2 * 1024 * 64
    assert parameters % 128 == 0 + 64  # the buffer gets 64 elements of padding
    found = of_trainer(args)
    assert found.tokens == 256
    assert found.parameters == 2 * (parameters + 64)
    assert found.gradients == 4 * (parameters + 64)
    assert found.optimizer == 12 * (parameters + 64) // 2
    # per token: inputs and outputs of two norms; projected and rotated queries, keys, values; their output; a number
    # per head; gate, up and their product
    kept = 2 * (4 * 64 + (128 + 2 * 64) + (128 + 64) + 128 + 3 * 160) + 4 * 8
    assert found.activations == 256 * (2 * kept + 2 * 2 * 64)  # and input and output of the last norm
    assert found.logits == 1024 * (2 * 256 + 4 * 3 * 256)  # in bf16, their gradient in the same place; three chunks
    assert found.host == 0
    assert found.step == found.static + found.activations + max(found.logits, found.recomputed)


def test_a_plain_layer_keeps_what_the_paper_says() -> None:
    """Korthikanti et al.: 34 s b h, of which 2 are dropout masks; our attention keeps 4 more (see the docstring)."""
    args = bare_args(swiglu=False, group_query_attention=False, num_attention_heads=4, ffn_hidden_size=256)
    shape = shape_of(args)
    found = layer_bytes(shape, LayerKind(linear=False, moe=False), Parallel(), Kept())
    assert sum(found.values()) == (34 - 2 + 4) * 64 + 4 * 4
    masks = layer_bytes(shape, LayerKind(linear=False, moe=False), Parallel(), Kept(dropout=True))
    assert sum(masks.values()) - sum(found.values()) == 2 * 64


def test_tensor_and_sequence_parallelism_divide_a_layer() -> None:
    shape = shape_of(bare_args())
    kind = LayerKind(linear=False, moe=False)
    whole = layer_bytes(shape, kind, Parallel(), Kept())
    divided = layer_bytes(shape, kind, Parallel(tp=2, sequence=True), Kept())
    assert divided == {name: size / 2 for name, size in whole.items()}
    without = layer_bytes(shape, kind, Parallel(tp=2), Kept())
    assert sum(without.values()) == (sum(whole.values()) + 8 * 64) / 2  # norms and their inputs are not divided


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ({"core_attn"}, {"softmax"}),
        ({"layernorm", "mlp"}, {"norms", "mlp"}),
        ({"mla_up_proj"}, set()),
    ],
)
def test_selective_recomputation_spares_its_modules(modules: set[str], names: set[str]) -> None:
    found = layer_bytes(shape_of(bare_args()), LayerKind(linear=False, moe=False), Parallel(), Kept())
    expected = sum(found.values()) - sum(found[name] for name in names)
    assert spared(found, Kept(modules=frozenset(modules))) == expected


def test_full_recomputation_keeps_the_inputs() -> None:
    args = bare_args(micro_batch_size=1, rollout_max_context_len=256, actor_num_gpus_per_node=1, num_layers=4)
    last_norm = 2 * 2 * 64
    kept = 2 * (4 * 64 + (128 + 2 * 64) + (128 + 64) + 128 + 3 * 160) + 4 * 8
    for method, layers, inputs, whole in [("uniform", 1, 4, 0), ("uniform", 2, 2, 0), ("uniform", 3, 2, 0),
                                          ("block", 3, 3, 1), ("block", 9, 4, 0)]:  # fmt: skip
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", method, layers
        assert of_trainer(args).activations == 256 * (inputs * 2 * 64 + whole * kept + last_norm), (method, layers)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 12),
        ({"fp32": True}, 8),
        ({"optimizer": "sgd"}, 8),
        ({"use_stateless_adam": True}, 4),
        ({"use_precision_aware_optimizer": True}, 2 + 8),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, 12),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, 2 + 2 + 1),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}, 0),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25}, 9),
        ({"optimizer_cpu_offload": True}, 0),
    ],
)
def test_optimizer_state_per_parameter(flags: dict[str, Any], expected: float) -> None:
    assert state_bytes(bare_args(**flags)) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rollout_max_context_len": 1000, "micro_batch_size": 2}, 2048),
        ({"rollout_max_response_len": 1000, "rollout_max_prompt_len": 100}, 1152),
        ({"rollout_max_response_len": 1000}, 1024),
        ({}, 4096),  # --seq-length
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 5000, "rollout_max_response_len": 1000}, 5120),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 512, "rollout_max_response_len": 1000}, 1024),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 512, "rollout_max_response_len": 1024,
          "context_parallel_size": 2}, 512),
        ({"rollout_max_context_len": 1000, "tensor_model_parallel_size": 4}, 1024),
        ({"rollout_max_context_len": 1000, "data_pad_size_multiplier": 8}, 1000),
    ],
)  # fmt: skip
def test_tokens_of_a_micro_batch(flags: dict[str, Any], expected: int) -> None:
    args = bare_args(**flags)
    assert micro_batch_tokens(args, model_size(args).parallel) == expected


def _most_in_flight(pp: int, stage: int, chunks: int, group: int, micro_batches: int) -> int:
    """Walk through a rank's schedule (warm-up, one forward one backward, cool-down); return the most chunks held."""
    total = micro_batches * chunks
    warm_up = pp - stage - 1 if chunks == 1 else 2 * (pp - stage - 1) + (chunks - 1) * group
    steps = "F" * min(warm_up, total) + "FB" * max(0, total - warm_up)
    steps += "B" * (total - steps.count("B"))
    held = most = 0
    for step in steps:
        held += 1 if step == "F" else -1
        most = max(most, held)
    assert held == 0
    return most


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (4, 2), (2, 4)])
def test_micro_batches_in_flight(pp: int, vpp: int, micro_batches: int) -> None:
    args = bare_args(global_batch_size=micro_batches, micro_batch_size=1)
    for stage in range(pp):
        held = _in_flight(args, Parallel(pp=pp, vpp=vpp), stage)
        assert sum(held) == _most_in_flight(pp, stage, vpp, pp, micro_batches)
        assert len(held) == vpp


def test_dynamic_batches_fill_the_pipeline() -> None:
    args = bare_args(global_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=512)
    assert [_in_flight(args, Parallel(pp=3), stage) for stage in range(3)] == [[3], [2], [1]]


def test_the_last_stage_borrows_the_embedding_for_mtp_layers() -> None:
    flags = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    trained, kept = bare_args(**flags, enable_mtp_training=True), bare_args(**flags)
    stages = [trainer_memory(args, model_size(args)) for args in (trained, kept)]
    assert stages[0][1].activations - stages[1][1].activations == 2 * model_size(kept).shape.vocab * 64
    assert stages[0][0].activations == stages[1][0].activations


def test_copies_in_host_memory() -> None:
    args = bare_args(actor_num_gpus_per_node=1)
    total = model_size(args).total
    assert of_trainer(args).host == 0
    assert of_trainer(bare_args(actor_num_gpus_per_node=1, use_kl_loss=True)).host == 2 * 2 * total
    offloaded = of_trainer(bare_args(actor_num_gpus_per_node=1, offload_train=True))
    assert offloaded.host == offloaded.optimizer  # the parameters are made of it again
    assert offloaded.sending == offloaded.parameters + offloaded.context + offloaded.transfer
    vocabulary = 2 * 2 * model_size(args).shape.vocab * model_size(args).shape.hidden  # in bf16, and the flat copy
    small = {"offload_train": True, "update_weight_buffer_size": 1}
    alone = of_trainer(bare_args(actor_num_gpus_per_node=1, **small))
    assert 2 * alone.parameters > vocabulary
    assert (
        alone.sending == 3 * alone.parameters + alone.context
    )  # the fp32 weights are onloaded first, of two times the size
    shared = of_trainer(bare_args(actor_num_gpus_per_node=2, use_distributed_optimizer=True, **small))
    assert shared.masters == pytest.approx(2 * total, rel=0.01)
    assert of_trainer(bare_args(actor_num_gpus_per_node=1, fp32=True, **small)).masters == 0
    away = of_trainer(bare_args(actor_num_gpus_per_node=1, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0))
    assert (away.optimizer, away.host) == (0, of_trainer(args).optimizer)


def test_bytes_of_adapters_by_hand() -> None:
    """Gradients and optimizer state are those of the adapters, and the reference needs no copy."""
    flags: dict[str, Any] = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "use_kl_loss": True}
    whole, adapted = of_trainer(bare_args(**flags)), of_trainer(bare_args(**flags, lora_rank=8))
    # A whole and half of B for q, k, v, gate and up; half of A and B whole for o and down
    columns = (64 + 128 // 2) + 2 * (64 + 64 // 2) + 2 * (64 + 160 // 2)
    adapters = 4 * 8 * (columns + (128 // 2 + 64) + (160 // 2 + 64))
    size = model_size(bare_args(**flags))
    assert adapted.parameters == 2 * (size.ranks[0].total + adapters)
    assert adapted.gradients == 4 * adapters
    assert adapted.optimizer == 12 * adapters
    assert (adapted.activations, adapted.logits) == (whole.activations, whole.logits)
    assert adapted.host == 0 < whole.host
    only = of_trainer(bare_args(**flags, lora_rank=8, lora_target_modules=["q_proj"]))
    assert only.gradients == 4 * 4 * 8 * (64 + 128 // 2)
    asleep = of_trainer(bare_args(**flags, lora_rank=8, offload_train=True))
    assert asleep.host == asleep.optimizer + 2 * size.ranks[0].total


def of_engine(args: Namespace) -> EngineMemory:
    return engine_memory(args, shape_of(args))


@pytest.mark.parametrize(
    ("model", "gpus", "flags", "expected"),
    [
        ("Llama-3.1-8B-Instruct", 1, (), 32 * 2 * 8 * 128 * 2),  # the 128 KiB that everybody knows
        ("Qwen3-4B", 1, (), 36 * 2 * 8 * 128 * 2),
        ("Qwen3-4B", 4, (), 36 * 2 * 2 * 128 * 2),
        ("Qwen3-4B", 16, (), 36 * 2 * 1 * 128 * 2),  # eight heads for sixteen GPUs: every head is there twice
        ("Qwen3-4B", 2, ("--sglang-pp-size", 2), 18 * 2 * 8 * 128 * 2),
        ("Qwen3-4B", 1, ("--sglang-kv-cache-dtype", "fp8_e4m3"), 36 * 2 * 8 * 128),
        ("DeepSeek-V3", 16, (), 61 * (512 + 64) * 2),  # a latent, whole on every GPU: 70 KB
        ("Qwen3-Next-80B-A3B-Instruct", 2, (), 12 * 2 * 1 * 256 * 2),  # three of four layers have no cache
    ],
)
def test_cache_per_token(model: str, gpus: int, flags: tuple[Any, ...], expected: int) -> None:
    engine = memory(published_args(model, "--actor-num-gpus-per-node", 16, "--num-gpus-per-node", 16, "--colocate",
                                   "--rollout-num-gpus-per-engine", gpus, *flags)).engine  # fmt: skip
    assert engine is not None
    assert engine.kv_per_token == expected


def test_weights_of_one_gpu_are_the_checkpoint() -> None:
    args = published_args("Qwen3-4B", "--colocate", "--rollout-num-gpus-per-engine", 1)
    assert of_engine(args).weights == 2 * 4_022_468_096
    args.sglang_dtype = "float32"
    assert of_engine(args).weights == 4 * 4_022_468_096


def test_weights_of_two_gpus() -> None:
    """Norms are whole on both."""
    args = published_args("Qwen3-4B", "--colocate", "--rollout-num-gpus-per-engine", 2)
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert of_engine(args).weights == 4_022_468_096 + norms


def test_quantized_weights() -> None:
    """Eight bits for matrices, sixteen for embedding and norms; the name of a checkpoint says it too."""
    args = published_args("Qwen3-4B", "--colocate", "--rollout-num-gpus-per-engine", 1)
    embedding, norms = 151936 * 2560, 36 * (2 * 2560 + 2 * 128) + 2560
    matrices = 4_022_468_096 - embedding - norms
    args.sglang_quantization = "fp8"
    assert of_engine(args).weights == int(matrices * (1 + 4 / 128**2) + 2 * (embedding + norms))
    by_flag = of_engine(args).weights
    args.sglang_quantization, args.hf_checkpoint = None, "/models/Qwen3-4B-FP8"
    assert of_engine(args).weights == by_flag


@pytest.mark.parametrize(
    ("checkpoint", "config", "bytes_per_weight", "experts_only"),
    [
        ("/m/DeepSeek-R1", {}, 1 + 4 / 128**2, False),
        ("/m/DeepSeek-R1-bf16", {}, 2, False),
        ("/m/Kimi-K2-Thinking", {"n_routed_experts": 384}, 0.5625, True),
        ("/m/any", {"quantization_config": {"quant_method": "fp8"}}, 1 + 4 / 128**2, False),
        ("/m/any", {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*",
         "re:.*shared_experts.*"], "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}, 0.5625, True),
        ("/m/any", {"quantization_config": {"quant_method": "new"}}, 2, False),
    ],
)  # fmt: skip
def test_format_of_a_checkpoint(
    checkpoint: str, config: dict[str, Any], bytes_per_weight: float, experts_only: bool
) -> None:
    found = weight_format(bare_args(hf_checkpoint=checkpoint), config)
    assert (found.bytes_per_weight, found.experts_only) == (bytes_per_weight, experts_only)


def test_what_stays_free_follows_sglang() -> None:
    """Its rule by hand, for GPUs of 23 and 80 GiB and a fraction that is given."""
    args = published_args("Qwen3-4B", "--colocate", "--rollout-num-gpus-per-engine", 2)
    engine = of_engine(args)
    graphs = 8 + 14 + 8 + 8 + 12  # prefill graphs of up to 4096 tokens
    assert engine.reserve(23 * GIB) == (512 + 1.5 * 4096 + 2 * 128 + 2 * 48 + 8 * graphs) * 2**20
    assert engine.reserve(80 * GIB) == (512 + 1.5 * 8192 + 2 * 128 + 2 * 256 + 8 * (graphs + 8)) * 2**20
    args.sglang_chunked_prefill_size = 2048
    assert of_engine(args).reserve(80 * GIB) == 10 * GIB
    args.sglang_mem_fraction_static = 0.75
    assert of_engine(args).reserve(80 * GIB) == 20 * GIB


def test_tokens_and_requests_of_an_engine() -> None:
    args = published_args("Qwen3-4B", "--colocate", "--rollout-num-gpus-per-engine", 1, "--sglang-mem-fraction-static",
                          0.5, "--rollout-max-context-len", 1000)  # fmt: skip
    engine = of_engine(args)
    free = 40 * GIB - 2 * 4_022_468_096
    assert engine.tokens(80 * GIB) == free // 147_456
    assert engine.requests(80 * GIB) == free // 147_456 // 1000
    args.sglang_max_total_tokens = 5000
    assert of_engine(args).requests(80 * GIB) == 5
    assert not of_engine(args).fits(10 * GIB)


SHAPES = ("Qwen3-0.6B", "Qwen3-32B", "Llama-3.1-8B-Instruct", "Qwen3-30B-A3B", "DeepSeek-V3", "GLM-4.5-Air")


@pytest.fixture(scope="module")
def known() -> dict[str, Namespace]:
    """Resolved namespaces of published models, to be varied."""
    return {name: published_args(name, *COLOCATED, *DYNAMIC, "--actor-num-gpus-per-node", 1) for name in SHAPES}


def varied(args: Namespace, **values: Any) -> Namespace:
    """A copy with other values; the padded vocabulary follows."""
    return Namespace(**{**vars(args), "padded_vocab_size": None, **values})


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(SHAPES), tp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([1, 2, 4]),
       tokens=st.integers(256, 40_000), recompute=st.sampled_from([None, "selective", "full"]))  # fmt: skip
def test_less_is_never_more(
    known: dict[str, Namespace], data: Any, name: str, tp: int, dp: int, tokens: int, recompute: str | None
) -> None:
    """More ranks, fewer tokens and more recomputation never need more; buffers are padded by a few KB."""
    values: dict[str, Any] = {
        "tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, "actor_num_gpus_per_node": tp * dp,
        "max_tokens_per_gpu": tokens, "rollout_max_response_len": 128, "recompute_granularity": recompute,
        "recompute_method": "uniform", "recompute_num_layers": 1,
    }  # fmt: skip
    change = data.draw(st.sampled_from(["tp", "dp", "tokens", "recompute", "offload", "expert"]))
    less = dict(values)
    if change == "tp":
        less |= {
            "tensor_model_parallel_size": 2 * tp,
            "sequence_parallel": True,
            "actor_num_gpus_per_node": 2 * tp * dp,
        }
    elif change == "dp":
        less["actor_num_gpus_per_node"] = 2 * tp * dp
    elif change == "tokens":
        less["max_tokens_per_gpu"] = tokens // 2
    elif change == "recompute":
        less["recompute_granularity"] = "full"
    elif change == "offload":
        less |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    elif known[name].num_experts is not None:
        values["expert_tensor_parallel_size"] = less["expert_tensor_parallel_size"] = 1
        less["expert_model_parallel_size"] = tp * dp
    padding = 18 * 128 * 64
    assert of_trainer(varied(known[name], **less)).total <= of_trainer(varied(known[name], **values)).total + padding


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SHAPES), tp=st.sampled_from([1, 2, 4]), gigabytes=st.sampled_from(list(CAPACITIES)))
def test_engines_of_more_gpus_hold_no_less(known: dict[str, Namespace], name: str, tp: int, gigabytes: int) -> None:
    capacity = CAPACITIES[gigabytes]
    few, more = (
        of_engine(varied(known[name], rollout_num_gpus_per_engine=gpus, sglang_mem_fraction_static=0.8))
        for gpus in (tp, 2 * tp)
    )
    assert more.weights <= few.weights
    assert more.tokens(capacity) >= few.tokens(capacity)


def test_qwen3_4b_colocated_on_80_gb() -> None:
    found = memory(published_args("Qwen3-4B", *COLOCATED, *DYNAMIC, *FULL, "--tensor-model-parallel-size", 2,
                                  "--sequence-parallel", "--rollout-num-gpus-per-engine", 2))  # fmt: skip
    assert found.fits(CAPACITIES[80])
    assert found.fits(CAPACITIES[40])
    assert not found.fits(CAPACITIES[24])


R1 = ("--actor-num-nodes", 16, *COLOCATED, *FULL, "--tensor-model-parallel-size", 8, "--sequence-parallel",
      "--pipeline-model-parallel-size", 4, "--context-parallel-size", 4, "--expert-model-parallel-size", 32,
      "--expert-tensor-parallel-size", 1, "--decoder-last-pipeline-num-layers", 13, "--use-dynamic-batch-size",
      "--max-tokens-per-gpu", 16384, "--rollout-num-gpus-per-engine", 64)  # fmt: skip


def test_deepseek_on_16_nodes_of_80_gb_needs_an_offloaded_optimizer() -> None:
    """671 B parameters on 128 GPUs: expert gradients alone are 20 GiB, expert moments would be 60."""
    offload = ("--optimizer-cpu-offload", "--optimizer-offload-fraction", 1)
    assert not memory(published_args("DeepSeek-R1", *R1)).fits(CAPACITIES[80])
    assert memory(published_args("DeepSeek-R1", *R1, *offload)).fits(CAPACITIES[80])


def test_8b_does_not_train_on_one_gpu_of_80_gb() -> None:
    """Sixteen to eighteen bytes per parameter: 8 billion need 130 GiB before the first activation (ZeRO, section 3)."""
    found = memory(published_args("Llama-3.1-8B-Instruct", "--actor-num-gpus-per-node", 1, *COLOCATED)).trainer
    assert found is not None
    assert found.static - found.context == pytest.approx(18 * 8_030_261_248, rel=1e-3)


def test_what_takes_turns_and_what_does_not() -> None:
    flags = (*DYNAMIC, *FULL, "--tensor-model-parallel-size", 2, "--rollout-max-response-len", 8192,
             "--rollout-num-gpus-per-engine", 2, "--sglang-mem-fraction-static", 0.5)  # fmt: skip
    apart = memory(published_args("Qwen3-4B", *flags, "--rollout-num-gpus", 8))
    turns = memory(published_args("Qwen3-4B", *flags, "--colocate"))
    both = memory(published_args("Qwen3-4B", *flags, "--colocate", "--no-offload-rollout"))
    capacity = CAPACITIES[80]
    assert apart.trainer is not None
    assert turns.training(capacity) == apart.training(capacity) + CONTEXT  # what an offloaded engine keeps
    assert both.training(capacity) == apart.training(capacity) + capacity / 2 + CONTEXT


def test_groups_of_several_models(tmp_path: Path) -> None:
    """A frozen model counts its own parameters, and is beside the trainer only on the trainer's slots."""
    file = tmp_path / "engines.yaml"
    file.write_text("""
sglang:
  - name: actor
    server_groups:
      - {num_gpus: 2, num_gpus_per_engine: 2}
      - {num_gpus: 2, num_gpus_per_engine: 1, overrides: {mem_fraction_static: 0.5}}
      - {worker_type: placeholder, num_gpus: 4}
  - name: judge
    model_path: /models/Llama-3.1-8B-Instruct
    server_groups: [{num_gpus: 1, num_gpus_per_engine: 1}, {num_gpus: 1, num_gpus_per_engine: 1}]
  - name: other
    model_path: /models/unheard-of
    server_groups: [{num_gpus: 1}]
""")
    flags = (*COLOCATED, *DYNAMIC, *FULL, "--tensor-model-parallel-size", 2, "--actor-num-gpus-per-node", 8)
    args = published_args("Qwen3-4B", *flags, "--rollout-num-gpus", 11, "--sglang-config", file)
    found = memory(args)
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert [(group.label, group.shares, group.engine.weights) for group in found.engines] == [
        ("model actor, group 1", True, 4_022_468_096 + norms),
        ("model actor, group 2", True, 2 * 4_022_468_096),
        ("model judge, group 1", False, 2 * 8_030_261_248),
    ]
    assert [group.engine.static_fraction for group in found.engines] == [None, 0.5, None]
    assert found.engines[2].engine.request_tokens is None
    assert "the memory of model other (/models/unheard-of) is not counted: there is no config.json" in found.remarks
    text = memory_text(args)
    assert "engine     model judge, group 1, 1 GPU: tensor 1" in text
    assert "generating (model actor, group 2)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_text_by_eye() -> None:
    text = memory_text(published_args("Qwen3-4B", *COLOCATED, *DYNAMIC, *FULL, "--tensor-model-parallel-size", 2,
                                      "--sequence-parallel", "--rollout-num-gpus-per-engine", 2))  # fmt: skip
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert "4.02 B parameters" in text
    assert rows["parameters"].split()[1] == "3.7"
    assert rows["gradients"].split()[1] == "7.5"
    assert rows["80 GB"].split("  ")[2].strip().startswith("fits")
    assert "72.0 KiB per token" in rows["one request"]


@pytest.mark.parametrize("name", [name for name, model in models().items() if model.repositories])
def test_every_known_model_has_a_table_of_at_most_100_columns(name: str) -> None:
    checkpoint = models()[name].repositories[0].split("/")[-1]
    text = memory_text(published_args(checkpoint, *COLOCATED, "--rollout-num-gpus-per-engine", 1))
    assert "GPU" in text
    assert "No estimate" not in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("flags", "has", "has_not"),
    [
        (("--debug-train-only",), "trainer", "engine"),
        (("--debug-rollout-only", "--rollout-num-gpus", 8), "engine", "trainer"),
        (("--rollout-num-gpus", 0), "trainer", "engine"),
    ],
)
def test_only_what_there_is(flags: tuple[Any, ...], has: str, has_not: str) -> None:
    lines = memory_text(published_args("Qwen3-4B", *flags)).splitlines()
    starts = {line.split()[0] for line in lines if line.strip()}
    assert has in starts
    assert has_not not in starts


def test_says_so_where_the_model_is_not_described() -> None:
    assert "No estimate: the model is not described" in memory_text(bare_args(num_layers=None))


def test_is_quick() -> None:
    """The largest model; the best of five, in CPU time."""
    args = published_args("Kimi-K2-Instruct", *COLOCATED, "--rollout-num-gpus-per-engine", 8)
    times = []
    for _ in range(5):
        start = time.process_time()
        memory_text(args)
        times.append(time.process_time() - start)
    assert min(times) < 0.02


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, slime.preflight.plan.memory\n"
        "print([m for m in ('torch', 'ray', 'megatron', 'sglang', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@settings(max_examples=120, deadline=None)
@given(
    layers=st.integers(1, 9), pp=st.sampled_from([1, 2, 3, 4]), vpp=st.sampled_from([None, 2]),
    first=st.sampled_from([None, 1, 7]), last=st.sampled_from([None, 2, 30]), experts=st.sampled_from([None, 3, 8]),
    layout=st.sampled_from([None, "Et|tL", "E(t|)*3L", "t*2"]), gpus=st.sampled_from([1, 8]),
    recompute=st.sampled_from([None, "selective", "full"]), block=st.sampled_from([None, 1, 20]),
)  # fmt: skip
def test_always_answers(
    layers: int, pp: int, vpp: int | None, first: int | None, last: int | None, experts: int | None,
    layout: str | None, gpus: int, recompute: str | None, block: int | None,
) -> None:  # fmt: skip
    """A table, or a sentence that says why there is none; the dry run never fails on it."""
    text = memory_text(bare_args(
        num_layers=layers, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last, num_experts=experts,
        pipeline_model_parallel_layout=layout, actor_num_gpus_per_node=gpus, rollout_num_gpus=gpus,
        rollout_num_gpus_per_engine=gpus, recompute_granularity=recompute, recompute_num_layers=block,
        recompute_method="block" if block else "uniform", tensor_model_parallel_size=1, context_parallel_size=1,
    ))  # fmt: skip
    assert text.startswith(("  Per GPU", "  No estimate: "))
    assert max(map(len, text.splitlines())) <= 100 or text.startswith("  No estimate")


LARGE = ("Qwen3-32B", *COLOCATED, *DYNAMIC, *FULL, "--tensor-model-parallel-size", 8)


@pytest.mark.parametrize("model", [LARGE, ("Qwen3-4B", *COLOCATED, *DYNAMIC, *FULL)])
def test_the_smallest_gpu_on_which_everything_fits_is_named(model: tuple[Any, ...]) -> None:
    args = published_args(*model)
    found = memory(args)
    fitting = [gigabytes for gigabytes, capacity in CAPACITIES.items() if found.fits(capacity)]
    fits, sentence = fit_sentence(args, found)
    assert fits == bool(fitting)
    assert sentence == f"It fits on GPUs from {min(fitting)} GB, by the estimate above."
    for gigabytes in CAPACITIES:
        args.gpu_memory_gb = gigabytes
        assert fit_sentence(args, found)[0] == (gigabytes in fitting)


def test_what_is_too_large_for_every_gpu_says_by_how_much() -> None:
    args = published_args("Qwen3-235B-A22B", *COLOCATED, *DYNAMIC, *FULL)
    found = memory(args)
    fits, sentence = fit_sentence(args, found)
    over = (found.training(CAPACITIES[192]) - CAPACITIES[192]) / GIB
    assert not fits
    assert f"on every GPU of the table above, on GPUs of 192 GB training does not fit: {over:,.1f} over" in sentence
    args.gpu_memory_gb = 17.5
    assert "memory, by the estimate above: on GPUs of 17.5 GB training does not fit: " in fit_sentence(args, found)[1]


def smi(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (directory / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_run_is_warned_of_gpus_that_are_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = published_args("Qwen3-4B", *COLOCATED, *DYNAMIC, *FULL)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warning_of_this_machine(args) is None  # no GPU to ask
    smi(tmp_path, "printf '183359\\n24564\\n'", monkeypatch)  # the smallest counts, in MiB
    warning = warning_of_this_machine(args)
    assert warning is not None
    assert "the run does not fit: on GPUs of 24 GB training does not fit: " in warning
    smi(tmp_path, "printf '183359\\n'", monkeypatch)
    assert warning_of_this_machine(args) is None
    smi(tmp_path, "case $* in *--id=0,1) echo 183359;; *) echo 4096;; esac", monkeypatch)
    assert warning_of_this_machine(args) is not None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # without the smallest
    assert warning_of_this_machine(args) is None
    args.gpu_memory_gb = 24
    assert "on GPUs of 24 GB" in str(warning_of_this_machine(args))
    args.gpu_memory_gb = None
    for broken in ("exit 9", "echo '[N/A]'"):
        smi(tmp_path, broken, monkeypatch)
        assert warning_of_this_machine(args) is None
