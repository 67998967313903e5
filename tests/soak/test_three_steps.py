"""Every algorithm trains three rollouts through ``train.py``; its metrics are there, finite, and they move.

On every change GRPO, PPO, SFT and OPD do: tests/integration/test_loop_rl.py, _ppo.py, test_quickstart.py,
test_trainer_passes.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.run_train import Finished, rl_flags, run_train, sft_file, sft_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.soak
ROLLOUTS, STEPS = 3, 2  # steps in each rollout, so that the trained policy is not the one that generated


@dataclass(frozen=True)
class Case:
    """``flags`` beside those of a tiny run; ``moving`` metrics differ between steps (or rollouts), ``present`` may not.

    ``{teacher}`` in the flags is another checkpoint of the same shape.
    """

    flags: str
    moving: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


POLICY = ("train/pg_loss", "train/entropy_loss", "train/ppo_kl", "rollout/log_probs")
CASES: dict[str, Case] = {
    "gspo": Case("--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4", moving=("train/pg_clipfrac",)),
    "cispo": Case("--advantage-estimator cispo --eps-clip-high 0.28", present=("train/pg_clipfrac",)),
    "reinforce++": Case(
        "--advantage-estimator reinforce_plus_plus --kl-coef 0.05 --gamma 0.99 --normalize-advantages",
        moving=("rollout/kl", "rollout/returns", "rollout/ref_log_probs"),
    ),
    "reinforce++ baseline": Case(
        "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.05 --normalize-advantages",
        moving=("rollout/kl",),
    ),
    # Advantages of a group add up to 0: that their mean moves would be rounding.
    "rloo": Case("--advantage-estimator rloo", present=("rollout/advantages",)),
    "ppo": Case(
        "--advantage-estimator ppo --value-clip 0.2 --lambd 0.95 --kl-coef 0.01",
        moving=("train/critic-value_loss", "train/critic-grad_norm", "rollout/values", "rollout/returns"),
        present=("train/critic-value_clipfrac",),
    ),
    "opd": Case(
        "--advantage-estimator grpo --use-opd --opd-type megatron --opd-kl-coef 1.0 --opd-teacher-load {teacher}",
        moving=("train/opd_reverse_kl", "rollout/teacher_log_probs"),
    ),
}  # fmt: skip


def check(run: Finished, names: tuple[str, ...], *, moving: bool) -> None:
    for name in names:
        values = run.values(name)
        expected = ROLLOUTS * STEPS if name.startswith("train/") else ROLLOUTS
        assert len(values) == expected, (name, values)
        assert all(math.isfinite(value) for value in values), (name, values)
        if moving:
            assert len(set(values)) > 1, (name, values)


@pytest.mark.parametrize("name", CASES)
def test_policy_gradients(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    teacher = make_tiny_checkpoint(tmp_path / "teacher", seed=1)
    flags = [
        *rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl")),
        *f"""--num-rollout {ROLLOUTS} --global-batch-size 8 --rollout-shuffle --use-rollout-entropy
            --custom-rm-path tests.support.rollout_hooks.parity_reward""".split(),
        *case.flags.format(teacher=teacher).split(),
    ]
    run = run_train(flags, tmp_path / "run", timeout_s=600)
    check(run, ("train/loss", "train/grad_norm", *POLICY, *case.moving), moving=True)
    check(run, ("train/train_rollout_logprob_abs_diff", "rollout/raw_reward", *case.present), moving=False)
    # the policy that is trained is the one that generated, up to the first step of a rollout
    assert max(run.values("train/train_rollout_logprob_abs_diff")) < 1e-5


def test_sft(tmp_path: Path) -> None:
    flags = [
        *sft_flags(make_tiny_checkpoint(tmp_path / "model"), sft_file(tmp_path / "sft.jsonl")),
        *f"--num-rollout {ROLLOUTS} --global-batch-size 4".split(),
    ]
    run = run_train(flags, tmp_path / "run")
    check(run, ("train/loss", "train/grad_norm"), moving=True)
    loss = run.values("train/loss")
    assert loss[-1] < loss[0]
