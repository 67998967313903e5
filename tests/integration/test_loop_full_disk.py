"""Whole runs beside one another and on full disks: nothing of the first run is touched, and what is needed is named."""

from __future__ import annotations

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


def test_the_same_command_started_twice_leaves_the_first_run_untouched(flags: list[str], tmp_path: Path) -> None:
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
