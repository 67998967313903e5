"""Rules of mixture-of-experts layers, with the Hugging Face names as arguments: families differ in little else."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.layouts import Columns, GateUp, Replicated
from slime.backends.megatron_utils.weights.maps.dense import layer_rule
from slime.backends.megatron_utils.weights.maps.rule import Rule

GATED = ("gate_proj", "up_proj", "down_proj")


def routed_experts(prefix: str = "mlp.experts.{expert}.", names: tuple[str, str, str] = GATED) -> tuple[Rule, ...]:
    """Return the rules of routed experts with the tensors ``prefix`` + one of ``names`` (gate, up, down) + ``.weight``.

    Megatron has a weight per expert in one grouped module, or a module per expert (``local_experts``).
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        layer_rule(_expert_names("linear_fc1"), (gate, up), GateUp()),
        layer_rule(_expert_names("linear_fc2"), (down,), Columns()),
    )


def _expert_names(linear: str) -> tuple[str, str]:
    return f"mlp.experts.{linear}.weight{{expert}}", f"mlp.experts.local_experts.{{expert}}.{linear}.weight"


def router(name: str = "mlp.gate.weight") -> Rule:
    """Return the rule of the router's weight, ``[experts, hidden]``."""
    return layer_rule("mlp.router.weight", (name,), Replicated())


def expert_bias(name: str = "mlp.gate.e_score_correction_bias") -> Rule:
    """Return the rule of the bias by which a router picks experts (it has no part in their weights)."""
    return layer_rule("mlp.router.expert_bias", (name,), Replicated())


def shared_experts(prefix: str = "mlp.shared_experts.", names: tuple[str, str, str] = GATED) -> tuple[Rule, ...]:
    """Return the rules of the experts that every token passes, which are one gated MLP on either side."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        layer_rule("mlp.shared_experts.linear_fc1.weight", (gate, up), GateUp()),
        layer_rule("mlp.shared_experts.linear_fc2.weight", (down,), Columns()),
    )


def shared_expert_gate(name: str = "mlp.shared_expert_gate.weight") -> Rule:
    """Return the rule of the gate on the shared experts' output, ``[1, hidden]``."""
    return layer_rule("mlp.shared_experts.gate_weight", (name,), Replicated())
