"""On-policy distillation through ``train.py``, its log-probs and the KL by transformers.

The teacher is in the trainer or behind a server. On every change: a teacher's log-probs and what is learned of it in
``test_trainer_passes.py``, the server's in ``tests/unit/rollout/test_on_policy_distillation.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.engine import EngineProcess
from slime.rollout.debug_data import load_rollout
from tests.support.engines import Reference, engine_args
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tests.support.trainer import tiny_checkpoint
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
ROLLOUTS, STEPS = 2, 2
COEFFICIENT = 0.5
BY_SERVER = "slime.rollout.on_policy_distillation"


@contextlib.contextmanager
def teacher_of(kind: str, root: Path) -> Iterator[str]:
    """Write a teacher to ``root / "teacher"``, a server's of another architecture; yield the flags that ask it."""
    if kind == "megatron":
        teacher = tiny_checkpoint(root / "teacher", seed=1)
        yield f"--opd-teacher-load {teacher} --custom-rm-path tests.support.rollout_hooks.no_reward"
        return
    teacher = tiny_checkpoint(root / "teacher", seed=1, num_hidden_layers=3)
    server = EngineProcess(engine_args(teacher), rank=0, host="127.0.0.1", log_path=root / "teacher.log")
    try:
        server.start()
        server.wait_ready()
        yield f"""--rm-url {server.info.url}/generate --custom-rm-path {BY_SERVER}.reward_func
            --custom-reward-post-process-path {BY_SERVER}.post_process_rewards"""
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["megatron", "sglang"])
def distilled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Rewards are all zero: what is learned is the teacher's."""
    root = tmp_path_factory.mktemp("opd")
    make_tiny_checkpoint(root / "hf-before")
    with teacher_of(request.param, root) as asked:
        flags = f"""--num-rollout {ROLLOUTS} --global-batch-size 8 --lr 5e-3
            --use-opd --opd-type {request.param} --opd-kl-coef {COEFFICIENT} {asked}
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
            reported = teacher.log_probs(sample.tokens[:cut], sample.tokens[cut:])
            kls.append((student.log_probs(sample.tokens[:cut], sample.tokens[cut:]) - reported).mean().item())
            of_teacher.append(reported.mean().item())
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
