"""``train.py`` as a whole: one trainer, two engines behind the router; replay of its rollouts, kill and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.rollout.debug_data import load_rollout
from tests.support.run_train import Finished, Run, canary, read_metric, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
ROLLOUTS = 3


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("rl")
    extra = f"""--rollout-num-gpus 2 --num-rollout {ROLLOUTS} --rollout-shuffle
        --custom-rm-path tests.support.rollout_hooks.parity_reward --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01
        --kl-loss-type low_var_kl --eval-interval 2 --n-samples-per-eval-prompt 2 --check-weight-update-equal
        --rollout-data-postprocess-path tests.support.rollout_hooks.hold
        --eval-prompt-data sums {sums_file(root / "eval.jsonl", 3)}"""
    return [*rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl")), *extra.split()]


def saving(root: Path) -> list[str]:
    words = [
        "--save",
        root / "save",
        "--load",
        root / "save",
        "--save-interval",
        1,
        "--save-hf",
        root / "hf-{rollout_id}",
    ]
    return list(map(str, words))


def keeping(root: Path) -> list[str]:
    return [*saving(root), "--save-debug-rollout-data", str(root / "dumps" / "{rollout_id}.pt")]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> tuple[Finished, Path]:
    root = tmp_path_factory.mktemp("whole")
    return run_train([*flags, *keeping(root)], root / "run", first_look=True), root


def prompts(root: Path, rollout_id: int) -> list[tuple[int, int, str]]:
    samples = load_rollout(root / "dumps" / f"{rollout_id}.pt")
    return [(s.group_index, s.index, s.prompt) for s in samples]


def test_engines_and_trainer_agree_and_weights_arrive(whole):
    run, _ = whole
    assert sorted(run.metric("train/loss")) == [0, 1, 2]
    # fp32, and the engines have the trainer's weights: before the first rollout, and after every sync
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert canary(run.output) <= 1e-5
    assert run.metric("rollout/weight_version/min") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}
    # the reference model is where training started
    kl = run.metric("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert kl[1] > 1e-6
    assert all(norm > 0 for norm in run.metric("train/grad_norm").values())


def test_what_a_run_measures_and_leaves_behind(whole):
    run, root = whole
    reward = run.metric("rollout/raw_reward")
    for rollout_id in range(ROLLOUTS):
        samples = load_rollout(root / "dumps" / f"{rollout_id}.pt")
        assert len(samples) == 16
        assert reward[rollout_id] == pytest.approx(sum(s.reward for s in samples) / 16)
        assert [s.reward for s in samples] == [float(sum(s.tokens) % 2) for s in samples]
    assert sorted(run.metric("eval/sums")) == [0, 1]  # before training and after two rollouts
    assert sorted(run.metric("perf/stage/sync_weights_time")) == [0, 1, 2]
    assert sorted(run.metric("perf/rollout_time")) == [0, 1, 2]
    shown = [json.loads(line) for line in (run.run_dir / "samples" / "2.jsonl").read_text().splitlines()]
    assert {"prompt", "response", "reward"} <= shown[0].keys()
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    assert {"actor_rank0.log", "rollout_manager.log", "engine_0.log", "engine_1.log", "router.log"} <= logs
    assert len(run.output.splitlines()) < 40


def test_every_prompt_is_used_once(whole):
    _, root = whole
    seen = [p for rollout_id in range(ROLLOUTS) for p in prompts(root, rollout_id)]
    assert [index for _, index, _ in seen] == list(range(16 * ROLLOUTS))
    texts = {group: text for group, _, text in seen}
    assert len(texts) == 4 * ROLLOUTS
    assert len(set(texts.values())) == 4 * ROLLOUTS


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_replayed_rollouts_give_the_same_weights_without_engines(whole, flags, tmp_path, killed):
    """Also when the run is killed and resumed. On every change: a resume to the bit in test_trainer_resume.py."""
    run, root = whole
    command = [*flags, *saving(tmp_path), "--load-debug-rollout-data", str(root / "dumps" / "{rollout_id}.pt")]
    if killed:
        with Run(command, tmp_path / "killed", env={"SLIME_TEST_HOLD_AT": "1"}) as interrupted:
            interrupted.wait_for_log("actor_rank0", "holding rollout 1", 120)
            interrupted.process.kill()
            interrupted.process.wait(10)
    again = run_train(command, tmp_path / "run")
    for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy_loss"):
        assert sorted(again.metric(name)) == ([1, 2] if killed else [0, 1, 2])
        replayed = {**read_metric(tmp_path / "killed", name), **again.metric(name)}
        assert replayed == pytest.approx(run.metric(name), rel=1e-5, abs=1e-9), name
    last = f"hf-{ROLLOUTS - 1}/model-00001-of-00001.safetensors"
    assert (tmp_path / last).read_bytes() == (root / last).read_bytes()
    assert not (again.run_dir / "logs" / "router.log").exists()


def test_what_a_run_without_a_trainer_made_is_trained_on_by_one_without_engines(flags, tmp_path):
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    shorter = [*(word for word in flags if word != "--check-weight-update-equal"), "--num-rollout", "2"]
    command = [*shorter, "--debug-rollout-only", "--save-debug-rollout-data", dumps]
    generated = run_train(command, tmp_path / "generated")
    assert sorted(generated.metric("rollout/raw_reward")) == [0, 1]
    assert not generated.metric("train/loss")
    assert not (generated.run_dir / "logs" / "actor_rank0.log").exists()
    assert prompts(tmp_path, 1)[-1][1] == 31
    trained = run_train([*shorter, "--debug-train-only", "--load-debug-rollout-data", dumps], tmp_path / "trained")
    assert trained.metric("rollout/raw_reward") == generated.metric("rollout/raw_reward")
    assert all(norm > 0 for norm in trained.metric("train/grad_norm").values())
    assert not (trained.run_dir / "logs" / "router.log").exists()
    # all was generated with the weights that training starts from
    far = trained.metric("train/train_rollout_logprob_abs_diff")
    assert sorted(far) == [0, 1]
    assert far[0] <= 1e-5 < far[1]


@pytest.mark.soak
def test_a_killed_run_resumes_with_the_next_prompts(whole, flags, tmp_path):
    """On every change: its prompts in test_durable_buffer.py, the trainer in test_trainer_state.py."""
    _, root = whole
    command = [*flags, *keeping(tmp_path)]
    with Run(command, tmp_path / "killed", env={"SLIME_TEST_HOLD_AT": "1"}) as run:
        run.wait_for_log("actor_rank0", "holding rollout 1", 240)
        run.process.kill()
        run.process.wait(10)
        assert run.assert_nothing_left() < 30
    (tmp_path / "dumps" / "1.pt").unlink()  # generated, but never trained on
    resumed = run_train(command, tmp_path / "resumed")
    assert sorted(resumed.metric("train/loss")) == [1, 2]
    for rollout_id in range(ROLLOUTS):
        assert prompts(tmp_path, rollout_id) == prompts(root, rollout_id)
    # what was trained goes to the engines before the first rollout, not the checkpoint they started from
    assert max(resumed.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert resumed.metric("train/kl_loss")[1] > 1e-6
