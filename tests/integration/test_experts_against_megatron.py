"""Our experts compute what Megatron's ``SequentialMLP`` computes, and their checkpoints are interchangeable."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.distributed import run_distributed

CASES: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": "silu", "gated_linear_unit": True},
    "swiglu, fused": {"activation_func": "silu", "gated_linear_unit": True, "bias_activation_fusion": True},
    "gated, clamped and shifted": {
        "activation_func": "gelu",
        "gated_linear_unit": True,
        "activation_func_clamp_value": 2.0,
        "glu_linear_offset": 1.0,
    },
    "biases": {
        "activation_func": "quick_gelu",
        "gated_linear_unit": True,
        "activation_func_clamp_value": 2.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
    },
    "not gated": {"activation_func": "gelu", "gated_linear_unit": False},
    "probabilities on the input": {
        "activation_func": "silu",
        "gated_linear_unit": True,
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    target = "tests.support.sequential_experts:compare"
    whole = run_distributed(target, 1, {"cases": CASES, "in_float64": True}, timeout=120, fresh=True)
    # Megatron refuses biases where ranks divide experts: test_model_families.py has that case.
    cut = {"cases": {n: case for n, case in CASES.items() if n != "biases"}, "in_float64": True, "tensor_size": 2}
    halves = run_distributed(target, 2, cut, timeout=120, fresh=True)
    return {"whole": whole, "halves": halves}


@pytest.mark.parametrize(
    ("experts", "name"), [(e, n) for e in ("whole", "halves") for n in CASES if (e, n) != ("halves", "biases")]
)
def test_output_gradients_and_checkpoint_are_those_of_megatron(experts: str, name: str, found: dict[str, Any]) -> None:
    for rank in found[experts]:
        apart = rank[name]
        assert len(apart) == 3 + 2 * 4 * (2 if name == "biases" else 1) + 1
        assert max(apart.values()) < 1e-13, apart
