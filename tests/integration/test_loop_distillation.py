"""On-policy distillation through ``train.py``: the teacher in the trainer, its log-probs and the KL by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.rollout.debug_data import load_rollout
from tests.support.engines import Reference
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tests.support.trainer import tiny_checkpoint
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
ROLLOUTS, STEPS = 2, 2
COEFFICIENT = 0.5


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Rewards are all zero: what is learnt is the teacher's."""
    root = tmp_path_factory.mktemp("opd")
    make_tiny_checkpoint(root / "hf-before")
    teacher = tiny_checkpoint(root / "teacher", seed=1)
    flags = f"""--num-rollout {ROLLOUTS} --global-batch-size 8 --lr 5e-3
        --use-opd --opd-type megatron --opd-kl-coef {COEFFICIENT} --opd-teacher-load {teacher}
        --custom-rm-path tests.support.rollout_hooks.no_reward
        --save {root / "save"} --save-hf {root / "hf-{rollout_id}"} --save-interval 1
        --save-debug-rollout-data {root / "dumps" / "{rollout_id}.pt"}"""
    run = run_train([*rl_flags(root / "hf-before", sums_file(root / "sums.jsonl")), *flags.split()], root / "run")
    return run, root


def test_the_kl_is_that_of_transformers(distilled: tuple[Finished, Path]) -> None:
    run, root = distilled
    teacher = Reference(root / "teacher")
    for number in range(ROLLOUTS):
        student = Reference(root / ("hf-before" if number == 0 else f"hf-{number - 1}"))
        kls, of_teacher = [], []
        for sample in load_rollout(root / "dumps" / f"{number}.pt"):
            cut = len(sample.tokens) - sample.response_length
            told = teacher.log_probs(sample.tokens[:cut], sample.tokens[cut:])
            kls.append((student.log_probs(sample.tokens[:cut], sample.tokens[cut:]) - told).mean().item())
            of_teacher.append(told.mean().item())
        mean = sum(kls) / len(kls)
        assert run.metric("rollout/opd_reverse_kl")[number] == pytest.approx(mean, abs=1e-5)
        assert run.metric("rollout/teacher_log_probs")[number] == pytest.approx(sum(of_teacher) / len(kls), abs=1e-5)
        assert run.metric("rollout/advantages")[number] == pytest.approx(-COEFFICIENT * mean, abs=1e-5)
        steps = run.values("train/opd_reverse_kl")[number * STEPS : (number + 1) * STEPS]
        assert sum(steps) / STEPS == pytest.approx(mean, abs=1e-5)


def test_there_is_something_to_learn_without_a_reward(distilled: tuple[Finished, Path]) -> None:
    run, _ = distilled
    assert set(run.metric("rollout/raw_reward").values()) == {0.0}
    assert min(run.values("train/grad_norm")) > 1e-2
    # the student's weights are in their place again when they are pushed
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
