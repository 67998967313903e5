"""Public names of the policy-optimisation functions; they live in ``slime.algorithms``."""

from __future__ import annotations

from typing import Any

_HOMES = {
    "calculate_log_probs_and_entropy": "slime.algorithms.log_probs",
    "chunked_discounted_returns": "slime.algorithms.scan",
    "chunked_gae": "slime.algorithms.gae",
    "compute_approx_kl": "slime.algorithms.kl",
    "compute_cispo_loss": "slime.algorithms.policy_loss",
    "compute_gspo_kl": "slime.algorithms.policy_loss",
    "compute_opsm_mask": "slime.algorithms.policy_loss",
    "compute_policy_loss": "slime.algorithms.policy_loss",
    "get_advantages_and_returns_batch": "slime.algorithms.gae",
    "get_grpo_returns": "slime.algorithms.advantages",
    "get_reinforce_plus_plus_baseline_advantages": "slime.algorithms.advantages",
    "get_reinforce_plus_plus_returns": "slime.algorithms.advantages",
    "vanilla_gae": "slime.algorithms.gae",
}
__all__ = [*_HOMES, "compute_log_probs"]


def compute_log_probs(logits: Any, tokens: Any, process_group: Any) -> Any:
    """Return log-probs [T, 1] of ``tokens`` [T] under ``logits`` [T, V_local]; older than the name it points to."""
    from slime.utils.moved import warn_moved

    name = "calculate_log_probs_and_entropy"
    warn_moved(f"{__name__}.compute_log_probs", f"{__name__}.{name}(logits, tokens, group)[0]")
    return __getattr__(name)(logits, tokens, process_group)[0]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
