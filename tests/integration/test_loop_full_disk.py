"""Whole runs beside one another and on full disks: nothing of the first run is touched, and what is needed is named."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support import small_disk
from tests.support.run_train import Run, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
needs_mount = pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("rl")
    return rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl"))


def saving(root: Path, rollouts: int) -> list[str]:
    save = str(root / "save")
    return ["--save", save, "--load", save, "--save-interval", "1", "--num-rollout", str(rollouts)]


@needs_mount
@pytest.mark.soak
def test_a_full_run_directory_ends_nothing(flags: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = small_disk.command(disk, "256k", fill=True)
    with Run([*flags, *saving(tmp_path, 3)], disk / "run", inside=inside) as run:
        found = run.finish(DEADLINE_S)
    assert found.returncode == 0, found.output
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "2\n"
    for what in ("the run directory", "metrics", "samples"):
        assert f"{what} cannot be written" in found.output
    assert "(0 MiB are free there)" in found.output


@pytest.mark.soak
def test_the_same_command_started_twice_leaves_the_first_run_untouched(flags: list[str], tmp_path: Path) -> None:
    """On every change: the lock by itself, in tests/unit/utils/test_directory_lock.py."""
    words = [*flags, *saving(tmp_path, 6)]
    tracker = tmp_path / "save/latest_checkpointed_iteration.txt"
    with Run(words, tmp_path / "run") as first:
        first.wait_for(r"rollout 1 of 6", DEADLINE_S)
        with Run(words, tmp_path / "run") as second:
            refused = second.finish(DEADLINE_S)
        assert refused.returncode == 2, refused.output
        assert (
            f"--save {tmp_path}/save is being written by another run, process {first.process.pid} on" in refused.output
        )
        done = first.finish(DEADLINE_S)
    assert done.returncode == 0, done.output
    assert tracker.read_text() == "5\n"
    steps = [int(step) for step in done.values("train/step")] or sorted(done.metric("train/loss"))
    assert steps == list(range(6))
    assert len(done.values("train/loss")) == 6


@needs_mount
def test_a_full_shared_memory_is_named_before_anything_starts(flags: list[str], tmp_path: Path) -> None:
    inside = small_disk.command(Path("/dev/shm"), "64m", fill=True)
    with Run([*flags, *saving(tmp_path, 1)], tmp_path / "run", inside=inside) as run:
        found = run.finish(DEADLINE_S)
    assert found.returncode == 2, found.output
    assert "error: /dev/shm has 0 of 64 MiB free" in found.output
    assert not list((tmp_path / "save").glob("*"))


@pytest.mark.soak
@needs_mount
def test_a_small_shared_memory_is_enough_or_named(flags: list[str], tmp_path: Path) -> None:
    inside = small_disk.command(Path("/dev/shm"), "17m")
    with Run([*flags, *saving(tmp_path, 1)], tmp_path / "run", inside=inside) as run:
        found = run.finish(DEADLINE_S)
    assert "shared memory: /dev/shm has 17 of 17 MiB free" in found.output
    if found.returncode != 0:
        assert found.output.partition("\nerror: ")[2].count("/dev/shm has"), found.output


@pytest.mark.soak
def test_a_stopped_trainer_is_named_while_the_run_waits(flags: list[str], tmp_path: Path) -> None:
    with Run([*flags, "--num-rollout", "3"], tmp_path / "run") as run:
        run.wait_for(r"rollout 0 of 3", DEADLINE_S)
        log = (tmp_path / "run/logs/actor_rank0.log").read_text()
        trainer = int(re.findall(r"actor_rank0 of run \S+: pid (\d+)", log)[-1])
        os.kill(trainer, signal.SIGSTOP)
        said = run.wait_for(r"waits for actor rank 0, whose process", 60.0)
        assert f"process {trainer} is stopped" in said
        os.kill(trainer, signal.SIGCONT)
        found = run.finish(DEADLINE_S)
    assert found.returncode == 0, found.output
