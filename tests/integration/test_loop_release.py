"""``--release-train``: trainers end while engines generate; weights reach the engines through files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration


@pytest.mark.soak
def test_released_trainers_train_as_those_that_stay(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags += ["--num-rollout", "2", "--lr-decay-style", "cosine"]
    flags += ["--custom-rm-path", "tests.support.rollout_hooks.parity_reward"]
    save, shared, hooked = tmp_path / "save", tmp_path / "shared", tmp_path / "hooked.jsonl"
    released = f"""--release-train --colocate --save {save} --save-interval 100 --check-weight-update-equal
        --update-weight-transport disk --update-weight-disk-dir {shared}
        --update-weight-local-checkpoint-dir {tmp_path / "local"}
        --custom-update-weight-post-write-path tests.support.rollout_hooks.note_weight_files
        --save-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"""
    run = run_train([*flags, *released.split()], tmp_path / "run", env={"SLIME_TEST_HOOKED": str(hooked)})

    assert run.output.count("the actor has been released") == 3  # before the first rollout, and after each
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    # --save-interval 100 asks for the last checkpoint alone; that of rollout 0 was there for the way back.
    assert sorted(path.name for path in save.glob("iter_*")) == ["iter_0000001"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    assert list(shared.iterdir()) == []
    assert [path.name for path in (tmp_path / "local").glob("weight_*")] == ["weight_v000003"]
    reported = [json.loads(line) for line in hooked.read_text().splitlines()]
    assert [Path(one["directory"]).name for one in reported] == ["weight_v000001", "weight_v000002", "weight_v000003"]
    assert all(one["engines"] == 1 and one["complete"] for one in reported)

    replayed = f"--debug-train-only --load-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt".split()
    stayed = run_train([*flags, *replayed], tmp_path / "stayed")
    for name in ("train/loss", "train/grad_norm", "train/pg_loss", "train/lr-pg_0"):
        assert run.metric(name) == stayed.metric(name) != {}, name
