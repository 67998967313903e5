"""``train.py`` with adapters: pushed alone and merged, killed by its end and resumed, with a critic of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

LORA = "--lora-rank 8 --lora-alpha 16 --lr 1e-2 --save-interval 1 --rollout-shuffle"


def flags_of(root: Path, more: str) -> list[str]:
    flags = rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl"))
    saving = f"--save {root / 'save'} --load {root / 'save'}"
    reward = "--custom-rm-path tests.support.rollout_hooks.parity_reward"
    return [*flags, *f"{LORA} {saving} {reward} {more}".split()]


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_engines_have_what_was_trained(sync: str, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, f"--lora-sync {sync} --use-kl-loss --kl-loss-coef 0.1 --rollout-num-gpus 2")
    run = run_train([*flags, "--num-rollout", "3"], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/min") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}
    kl = run.metric("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert abs(kl[1]) > 1e-6
    assert json.loads((tmp_path / "save" / "iter_0000002" / "adapter" / "adapter_config.json").read_text())["r"] == 8
    again = run_train([*flags, "--num-rollout", "5"], tmp_path / "again")
    assert sorted(again.metric("train/loss")) == [3, 4]
    assert max(again.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5


def test_requests_in_flight_keep_their_adapter(tmp_path: Path) -> None:
    """Generation overlaps with training: samples are of the version that they began with, and of no other."""
    more = "--lora-sync adapter --num-rollout 4 --use-rollout-logprobs"
    run = run_train(flags_of(tmp_path, more), tmp_path / "run", script="train_async.py")
    assert sorted(run.metric("train/loss")) == [0, 1, 2, 3]
    assert run.metric("rollout/weight_version/max")[3] >= 3


def test_actor_and_critic_have_adapters_of_their_own(tmp_path: Path) -> None:
    more = "--advantage-estimator ppo --kl-coef 0.05 --num-critic-only-steps 1"
    run = run_train([*flags_of(tmp_path, more), "--num-rollout", "2"], tmp_path / "run")
    assert run.metric("train/critic-grad_norm")[0] > 0
    again = run_train([*flags_of(tmp_path, more), "--num-rollout", "3"], tmp_path / "again")
    assert sorted(again.metric("train/loss")) == [2]
