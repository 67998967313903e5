"""The estimate of a dry run against what megatron-core really allocates and what autograd really keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.preflight.plan.memory_trainer import kept_of, layer_bytes, spared, state_bytes, trainer_memory
from slime.preflight.plan.model_size import ModelSize, model_size
from tests.support.distributed import run_distributed
from tests.support.memory_ranks import case_args

pytestmark = pytest.mark.integration

RANKS = 4
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32", "moe_shared_expert_intermediate_size": 48,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0, "qk_layernorm": True,
    "group_query_attention": False, "num_query_groups": None,
}  # fmt: skip
BF16 = {"bf16": True, "fp32": False, "accumulate_allreduce_grads_in_fp32": True}
STATIC: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4 bf16": BF16,
    "dp4 bf16 gradients": {**BF16, "accumulate_allreduce_grads_in_fp32": False, "grad_reduce_in_bf16": True},
    "tp2 pp2": {**TP2, **PP2},
    "tp2 pp2 untied": {**TP2, **PP2, "untie_embeddings_and_output_weights": True},
    "tp2 dp2": {**TP2, "sequence_parallel": True},
    "tp4, 2 groups": {"tensor_model_parallel_size": 4},
    "pp2 dp2": PP2,
    "pp2 cp2": {**PP2, "context_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2 uneven": {**PP2, "decoder_first_pipeline_num_layers": 1},
    "pp2 vpp2": {**PP2, "virtual_pipeline_model_parallel_size": 2},
    "pp2 layout": {**PP2, "pipeline_model_parallel_layout": "Et|tttL"},
    "ep4": {**EXPERTS, "expert_model_parallel_size": 4},
    "tp2 ep2 etp1": {
        **EXPERTS, **TP2, "sequence_parallel": True, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
    },
    "tp2 ep2 etp2": {**EXPERTS, **TP2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    "pp2 ep2": {**EXPERTS, **PP2, "expert_model_parallel_size": 2},
    "tp2 latent": {**LATENT, **TP2},
    "tp2 pp2 latent experts": {**LATENT, **EXPERTS, **TP2, **PP2, "sequence_parallel": True},
}  # fmt: skip
TOKENS, SEQUENCE, FP32 = 64, 32, 4
KEPT: dict[str, dict[str, Any]] = {
    "grouped queries": {"qk_layernorm": False},
    "normalized queries": {},
    "gate in parts": {"bias_swiglu_fusion": False, "qk_layernorm": False},
    "experts' gates in parts": {**EXPERTS, "moe_layer_freq": 1, "qk_layernorm": False, "bias_swiglu_fusion": False},
    "no gate": {"swiglu": False, "gated_linear_unit": False, "qk_layernorm": False},
    "experts": {**EXPERTS, "moe_layer_freq": 1, "qk_layernorm": False},
    "latent": LATENT,
    "full recomputation": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recomputed MLP": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}
KEPT_ON_TWO: dict[str, dict[str, Any]] = {"tp2": TP2, "tp2 sp": {**TP2, "sequence_parallel": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tools.tiny_model import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def static(checkpoint: Path) -> dict[str, list[dict[str, int]]]:
    """Return the bytes that every rank holds, by case."""
    arguments = {"checkpoint": str(checkpoint), "ranks": RANKS, "cases": list(STATIC.values())}
    ranks = run_distributed("tests.support.memory_ranks:static_bytes", RANKS, arguments, timeout=300)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(STATIC)}


@pytest.fixture(scope="module")
def kept(checkpoint: Path) -> dict[str, float]:
    """Return the bytes per token that a layer keeps for backward, by case."""
    found: dict[str, float] = {}
    for ranks, cases in ((1, KEPT), (2, KEPT_ON_TWO)):
        arguments = {
            "checkpoint": str(checkpoint), "ranks": ranks, "cases": list(cases.values()), "tokens": TOKENS,
            "sequence": SEQUENCE,
        }  # fmt: skip
        first, *others = run_distributed("tests.support.memory_ranks:kept_bytes", ranks, arguments, timeout=300)
        assert all(other == first for other in others)
        found |= dict(zip(cases, first, strict=True))
    return found


@pytest.mark.parametrize("case", STATIC)
def test_parameters_of_every_rank(case: str, checkpoint: Path, static: Any) -> None:
    size = model_size(case_args(checkpoint, RANKS, **STATIC[case]))
    for rank in static[case]:
        assert size.ranks[rank["stage"]].total == rank["count"]


@pytest.mark.parametrize("case", STATIC)
def test_bytes_of_weights_and_gradients(case: str, checkpoint: Path, static: Any) -> None:
    args = case_args(checkpoint, RANKS, **STATIC[case])
    estimates = trainer_memory(args, model_size(args))
    for rank in static[case]:
        estimate = estimates[rank["stage"]]
        assert (estimate.parameters, estimate.gradients) == (rank["parameters"], rank["gradients"])


@pytest.mark.parametrize("case", STATIC)
def test_bytes_of_optimizer_state(case: str, checkpoint: Path, static: Any) -> None:
    """All ranks together hold the state of every parameter once; the estimate is a rank's share of the padded buffer.

    Ranks differ: the padding has no state, so that the estimate is what a rank without padding in its share has.
    """
    args = case_args(checkpoint, RANKS, **STATIC[case])
    size = model_size(args)
    per_parameter = 12 if STATIC[case].get("bf16") else 8
    assert state_bytes(args) == per_parameter
    assert sum(rank["optimizer"] for rank in static[case]) == per_parameter * _owned(size)
    for stage, estimate in enumerate(trainer_memory(args, size)):
        largest = max(rank["optimizer"] for rank in static[case] if rank["stage"] == stage)
        padding = size.ranks[stage].dense_buffer + size.ranks[stage].expert_buffer - size.ranks[stage].total
        assert largest <= estimate.optimizer <= largest + per_parameter * padding


def _owned(size: ModelSize) -> int:
    """Parameters of all ranks, where those that data-parallel ranks share count once."""
    parallel = size.parallel
    per_stage = parallel.world_size // parallel.pp
    return sum(
        rank.dense * per_stage // parallel.dense_ranks + rank.expert * per_stage // parallel.expert_ranks
        for rank in size.ranks
    )


@pytest.mark.parametrize("case", [*KEPT, *KEPT_ON_TWO])
def test_what_a_layer_keeps(case: str, checkpoint: Path, kept: Any) -> None:
    """The formula is exact to the byte, given what a CPU's modules keep beyond those of a GPU, and spare."""
    on_two = case in KEPT_ON_TWO
    args = case_args(checkpoint, 2 if on_two else 1, **(KEPT_ON_TWO if on_two else KEPT)[case])
    size, how = model_size(args), kept_of(args, FP32)
    if how.granularity == "full":
        assert kept[case] == FP32 * size.shape.hidden
        return
    found = layer_bytes(size.shape, size.shape.kinds[-1], size.parallel, how)
    assert kept[case] == spared(found, how) + _cpu_extra(size)


def _cpu_extra(size: ModelSize) -> float:
    """Bytes per token and layer that a CPU keeps beyond a GPU: norms the scale of their input, attention its score
    matrices where queries and values differ in width; less the sines and cosines of queries and keys, which the layers
    share.
    """
    shape, tp = size.shape, size.parallel.tp
    norms = 2 * FP32 / size.parallel.sp
    if shape.latent is not None:
        norms += 2 * FP32
        return norms + FP32 * shape.heads * SEQUENCE - FP32 * shape.heads
    if shape.qk_norm:
        norms += FP32 * (shape.heads + shape.groups) / tp
    return norms - 4 * FP32 * shape.head_dim
