"""PPO through ``train.py``: critic and actor on the same slot, a critic that is killed, and the resume."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.run_train import Run, read_metric, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

ROLES = """megatron:
  - {role: actor, overrides: {lr: 1e-3}}
  - {role: critic, overrides: {lr: 5e-3}}
"""


def ppo_flags(root: Path, more: str = "") -> list[str]:
    """Flags of a tiny PPO run that saves every rollout; the critic learns alone in the first."""
    (root / "roles.yaml").write_text(ROLES)
    flags = rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl"))
    extra = f"""--advantage-estimator ppo --num-critic-only-steps 1 --kl-coef 0.05 --gamma 0.99 --lambd 0.95
        --normalize-advantages --megatron-config-path {root / "roles.yaml"} --check-weight-update-equal
        --save {root / "save"} --load {root / "save"} --save-interval 1 --override-opt_param-scheduler
        --custom-rm-path tests.support.rollout_hooks.parity_reward {more}"""
    return [*flags, *extra.split()]


def critic_process(run: Run) -> int:
    log = (run.run_dir / "logs" / "critic_rank0.log").read_text()
    found = re.search(r"critic_rank0 of run \S+ pid (\d+)", log)
    assert found, log
    return int(found.group(1))


def last_saved(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def check_learning(run_dir: Path) -> None:
    """The critic learns alone in rollout 0, in which the weights of the actor are pushed all the same."""
    losses = {name: read_metric(run_dir, name) for name in ("train/critic-value_loss", "train/loss")}
    assert min(losses["train/critic-value_loss"]) == 0
    assert min(losses["train/loss"]) == 1
    assert read_metric(run_dir, "rollout/weight_version/max")[1] == 2
    assert read_metric(run_dir, "rollout/returns")[0] != 0  # of rollout 0 the critic reports
    assert "rollout/kl" in (run_dir / "metrics.jsonl").read_text()
    rates = [read_metric(run_dir, f"train/{name}lr-pg_0")[1] for name in ("", "critic-")]
    assert rates == pytest.approx([1e-3, 5e-3])
    assert max(read_metric(run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert not [name for name in (run_dir / "metrics.jsonl").read_text().split('"') if "zero_std" in name]


def test_critic_and_actor_learn_and_are_saved(tmp_path: Path):
    run = run_train(ppo_flags(tmp_path, "--num-rollout 2"), tmp_path / "run")
    check_learning(run.run_dir)
    assert last_saved(tmp_path / "save") == last_saved(tmp_path / "save" / "critic") == 1


@pytest.mark.soak
def test_a_killed_critic_ends_the_run_which_resumes_from_both_checkpoints(tmp_path: Path):
    with Run(ppo_flags(tmp_path, "--num-rollout 100000"), tmp_path / "killed") as run:
        run.wait_for(r"rollout 1 of 100000", 240)
        killed_at = time.monotonic()
        os.kill(critic_process(run), signal.SIGKILL)
        ended = run.finish(60)
        assert time.monotonic() - killed_at < 30
        assert ended.returncode == 1
        run.assert_nothing_left(10)
    reported = ended.output[ended.output.index("error: ") :].splitlines()[0]
    assert "critic rank 0 ended unexpectedly during" in reported

    actor, critic = last_saved(tmp_path / "save"), last_saved(tmp_path / "save" / "critic")
    assert critic - actor in (0, 1)  # the critic is saved first
    resumed = run_train(ppo_flags(tmp_path, f"--num-rollout {actor + 3}"), tmp_path / "resumed")
    first = actor + 1
    for name in ("train/critic-value_loss", "train/loss", "rollout/values", "perf/critic-train_time"):
        assert sorted(resumed.metric(name)) == [first, first + 1], name
    assert last_saved(tmp_path / "save") == last_saved(tmp_path / "save" / "critic") == first + 1

    check_learning(ended.run_dir)
    assert max(resumed.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5


@pytest.mark.soak
def test_more_steps_of_the_critic_alone_after_a_resume(tmp_path: Path):
    """Rollouts 2 and 3 are the critic's alone, and neither is trained on again when the run is killed after them."""
    hold = "--rollout-data-postprocess-path tests.support.rollout_hooks.hold"
    run_train(ppo_flags(tmp_path, "--num-rollout 2"), tmp_path / "first")
    more = ppo_flags(tmp_path, f"--num-rollout 5 --num-critic-only-steps 4 {hold}")
    with Run(more, tmp_path / "killed", env={"SLIME_TEST_HOLD_AT": "4"}) as killed:
        killed.wait_for_log("actor_rank0", "holding rollout 4", 240)
        killed.process.kill()
        killed.process.wait(10)
        killed.assert_nothing_left()
    assert {2, 3} <= read_metric(killed.run_dir, "train/critic-value_loss").keys()
    assert not read_metric(killed.run_dir, "train/loss")
    assert (last_saved(tmp_path / "save"), last_saved(tmp_path / "save" / "critic")) == (1, 4)
    last = run_train(more, tmp_path / "last")
    assert "the critic resumes after rollout 3 and the actor with its weights after rollout 1" in last.output
    for name in ("train/critic-value_loss", "train/loss"):
        assert sorted(last.metric(name)) == [4], name
    # The engines generate with the actor's weights of rollout 1, as the trainer has them.
    assert max(last.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert last_saved(tmp_path / "save") == last_saved(tmp_path / "save" / "critic") == 4


@pytest.mark.soak
@pytest.mark.parametrize("way", ["colocated", "one step ahead", "replayed"])
def test_other_loops(tmp_path: Path, way: str):
    """Two ranks with tensor parallelism, so that values and weights are put together."""
    ranks = """--num-rollout 3 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel
        --rollout-num-gpus 2"""
    dumps = f"--save-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"
    colocate = "--colocate" if way == "colocated" else ""
    script = "train_async.py" if way == "one step ahead" else "train.py"
    run = run_train(ppo_flags(tmp_path, f"{ranks} {colocate} {dumps}"), tmp_path / "run", script=script)
    assert sorted(run.metric("train/critic-value_loss")) == [0, 1, 2]
    assert sorted(run.metric("train/loss")) == [1, 2]
    difference = run.metric("train/train_rollout_logprob_abs_diff")
    assert difference[1] <= 1e-5  # rollout 0 trained only the critic
    if way == "one step ahead":
        assert run.metric("rollout/weight_version/max")[2] == 2  # the weights of before rollout 1
    else:
        assert difference[2] <= 1e-5
    if way == "replayed":
        (tmp_path / "again").mkdir()
        replay = f"{ranks} --load-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"
        again = run_train(ppo_flags(tmp_path / "again", replay), tmp_path / "again" / "run")
        for name in ("train/loss", "train/grad_norm", "train/critic-value_loss", "train/critic-grad_norm"):
            assert again.metric(name) == pytest.approx(run.metric(name), rel=1e-5, abs=1e-9), name
