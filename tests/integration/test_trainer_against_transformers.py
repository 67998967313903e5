"""The trainer's losses and gradients are those of a plain transformers + autograd implementation."""

from __future__ import annotations

from typing import Any

import pytest

from slime.algorithms.rewards import normalize_rewards
from slime.utils.types import Sample
from tests.support import plain_grpo
from tests.support.arguments import run_args
from tests.support.distributed import run_distributed
from tests.support.trainer import make_train_data, tiny_checkpoint, trainer_args

TWO_STEPS = {"lr": 0.5, "global_batch_size": 4}
SCENARIOS: dict[str, dict[str, Any]] = {
    "grpo, KL, entropy, TIS": {
        **TWO_STEPS, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "use_tis": True,
    },
    "grpo, k2": {**TWO_STEPS, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2"},
    "gspo": {**TWO_STEPS, "advantage_estimator": "gspo"},
    "cispo": {**TWO_STEPS, "advantage_estimator": "cispo"},
    "dual clip, per token": {**TWO_STEPS, "eps_clip_c": 1.5, "calculate_per_token_loss": True},
    "one step": {"lr": 0.5, "global_batch_size": 8},
    "Dr. GRPO": {
        **TWO_STEPS, "pg_loss_reducer": "constant_length", "pg_loss_length": 24, "entropy_coef": 0.01,
        "use_kl_loss": True, "kl_loss_coef": 0.1,
    },
    "packed": {**TWO_STEPS, "micro_batch_size": 4, "log_probs_chunk_size": 5, "entropy_coef": 0.02},
    "masked samples": {**TWO_STEPS, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "use_tis": True},
    "masked samples, per token": {
        "lr": 0.2, "global_batch_size": 4, "entropy_coef": 0.01, "calculate_per_token_loss": True, "use_tis": True,
    },
    "one of eight trained, per token": {"lr": 0.5, "global_batch_size": 8, "calculate_per_token_loss": True},
    "one of eight trained, packed, per token": {
        "lr": 0.5, "global_batch_size": 8, "calculate_per_token_loss": True, "micro_batch_size": 4,
    },
}  # fmt: skip
MASKED = {"masked": (0, 3, 5, 6), "one": (0, 1, 2, 3, 4, 6, 7)}
"""By the first word of a scenario: which samples have no trained token."""


def data_of(name: str) -> dict[str, Any]:
    """Arguments of ``make_train_data``."""
    masked = MASKED.get(name.split()[0], ()) if name != "one step" else ()
    return {"seed": 3, "scaled": name != "Dr. GRPO", "masked": masked}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("plain")
    return tiny_checkpoint(folder / "actor", seed=0), tiny_checkpoint(folder / "ref", seed=1)


@pytest.fixture(scope="module")
def trained(checkpoints: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Return the trainer's report of every scenario, on one process."""
    checkpoint, reference = checkpoints
    scenarios = [
        {
            "args": {"load": checkpoint, "ref_load": reference, **args},
            "with_ref": bool(args.get("use_kl_loss")),
            "data": data_of(name),
        }
        for name, args in SCENARIOS.items()
    ]
    results = run_distributed(
        "tests.support.trainer_ranks:gradients", 1, {"checkpoint": checkpoint, "scenarios": scenarios}, timeout=300
    )[0]
    return dict(zip(SCENARIOS, results, strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_loss_and_gradients(name: str, checkpoints: tuple[str, str], trained: Any) -> None:
    checkpoint, reference = checkpoints
    args = trainer_args(checkpoint, **SCENARIOS[name])
    data = make_train_data(**data_of(name))
    expected = plain_grpo.train(args, checkpoint, reference if args.use_kl_loss else None, data)
    assert len(trained[name]["steps"]) == len(expected)
    for step, plain in zip(trained[name]["steps"], expected, strict=True):
        for metric, value in plain["metrics"].items():
            assert step[metric] == pytest.approx(value, rel=1e-5, abs=2e-7), metric
        assert step["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    gradients, plain_gradients = trained[name]["gradients"], expected[-1]["grads"]
    assert gradients.keys() == plain_gradients.keys()
    whole = expected[-1]["grad_norm"]
    for tensor, gradient in plain_gradients.items():
        difference = (gradients[tensor] - gradient).norm().item()
        assert difference <= 1e-5 * max(gradient.norm().item(), 1e-2 * whole), tensor


def test_dr_grpo_trains_on_rewards_that_are_only_centered() -> None:
    """The scenario trains on the rewards that the manager computes from raw rewards, and the others do not."""
    args = run_args(
        advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False, reward_key=None,
        n_samples_per_prompt=2, rollout_batch_size=4,
    )  # fmt: skip
    data = make_train_data(**data_of("Dr. GRPO"))
    samples = [Sample(index=i, group_index=i // 2, reward=raw) for i, raw in enumerate(data["raw_reward"])]
    assert normalize_rewards(args, samples) == pytest.approx(data["rewards"])
    assert make_train_data(**data_of("gspo"))["rewards"] != pytest.approx(data["rewards"], rel=0.1)


def test_second_step_is_off_policy(trained: Any) -> None:
    """Clipping and ratios are exercised: without it the comparison would only see the on-policy gradient."""
    assert trained["gspo"]["steps"][1]["pg_clipfrac"] > 0
    assert trained["grpo, KL, entropy, TIS"]["steps"][1]["pg_clipfrac"] > 0
    assert abs(trained["cispo"]["steps"][1]["ppo_kl"]) > 1e-3
    assert abs(trained["cispo"]["steps"][0]["ppo_kl"]) < 1e-7
