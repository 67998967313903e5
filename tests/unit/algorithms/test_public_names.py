"""The old import paths lead to the new homes, and these packages stay light."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PPO_UTILS = [
    "compute_approx_kl",
    "compute_policy_loss",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "calculate_log_probs_and_entropy",
    "get_grpo_returns",
    "get_reinforce_plus_plus_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_advantages_and_returns_batch",
    "vanilla_gae",
    "chunked_gae",
    "chunked_discounted_returns",
]
BALANCING = [
    "get_seqlen_balanced_partitions",
    "first_fit_pack",
    "expand_bins_by_splitting",
    "karmarkar_karp",
    "get_reverse_idx",
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("slime.utils.ppo_utils", PPO_UTILS),
        ("slime.utils.dp_schedule", ["build_dp_schedule"]),
        ("slime.utils.seqlen_balancing", BALANCING),
    ],
)
def test_old_paths(module: str, names: list[str]) -> None:
    loaded = importlib.import_module(module)
    for name in names:
        assert getattr(loaded, name).__name__ == name
        assert getattr(loaded, name).__module__.startswith(("slime.algorithms.", "slime.batching."))
    with pytest.raises(AttributeError, match="no_such_name"):
        loaded.no_such_name  # noqa: B018


def test_old_names_cost_nothing_until_used() -> None:
    script = (
        "import sys, slime.utils.ppo_utils, slime.utils.dp_schedule, slime.utils.seqlen_balancing\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.split() == ["False", "False"], result.stderr
