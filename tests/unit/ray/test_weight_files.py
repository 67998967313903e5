"""Versions of weights between trainers and engines, and checkpoints that were only for the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.ray.driver.train_group import TransientCheckpoints, resume_args
from slime.ray.driver.weight_push import WeightFiles
from tests.support.arguments import run_args


class Sides:
    """Trainers that write versions into a folder and engines that read them, both noting what they do."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.folder, self.failing = folder, 0
        self.log: list[str] = []
        given = {"release_train": False, "update_weight_disk_keep_files": False, **flags}
        self.files = WeightFiles(run_args(**given), self.publish, self.load)

    def publish(self, version: int, engines: Any, confirmed: int | None) -> str:
        directory = self.folder / f"weight_v{version:06d}"
        directory.mkdir()
        self.log.append(f"write {version}")
        return str(directory)

    def load(self, directory: str, version: int, synchronous_loop: bool) -> None:
        assert Path(directory).is_dir()
        if self.failing:
            self.failing -= 1
            raise RuntimeError("an engine is gone")
        self.log.append(f"read {version}")

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_versions_are_written_read_and_removed(tmp_path: Path) -> None:
    sides = Sides(tmp_path)
    for version in (1, 2):
        sides.files.begin()
        assert sides.files.push([], True) == version
        assert sides.on_disk() == []
    assert sides.log == ["write 1", "read 1", "write 2", "read 2"]


def test_a_push_that_failed_reads_the_same_files_again(tmp_path: Path) -> None:
    sides = Sides(tmp_path)
    sides.failing = 1
    sides.files.begin()
    with pytest.raises(RuntimeError, match="gone"):
        sides.files.push([], True)
    assert sides.files.push([], True) == 1
    assert sides.log == ["write 1", "read 1"]


def test_versions_are_kept_when_asked(tmp_path: Path) -> None:
    sides = Sides(tmp_path, update_weight_disk_keep_files=True)
    for _ in range(2):
        sides.files.begin()
        sides.files.push([], True)
    sides.files.clear()
    assert sides.on_disk() == ["weight_v000001", "weight_v000002"]


def test_engines_that_are_restarted_find_the_files_of_trainers_that_have_ended(tmp_path: Path) -> None:
    sides = Sides(tmp_path, release_train=True)
    sides.files.begin()
    sides.files.push([], True)
    assert sides.on_disk() == ["weight_v000001"]
    assert sides.files.push([], True) == 1  # in the middle of a rollout: no new version has begun
    assert sides.log == ["write 1", "read 1", "read 1"]
    sides.files.clear()
    assert sides.on_disk() == []


def test_trainers_restart_as_they_started_until_the_run_has_saved() -> None:
    args = run_args(load="hf", save="out", ckpt_step=4, finetune=True, no_load_optim=True, no_load_rng=True, lr=1.0)
    assert resume_args(args, None) is args
    going_on = resume_args(args, 9)
    assert (going_on.load, going_on.ckpt_step, going_on.lr) == ("out", 9, 1.0)
    assert [going_on.finetune, going_on.no_load_optim, going_on.no_load_rng] == [False] * 3
    assert args.load == "hf"


@pytest.mark.parametrize(
    ("flags", "due", "left"),
    [
        ({}, {3}, [3, 5]),
        ({}, {5}, [5]),
        ({"ref_update_interval": 2}, {5}, [1, 3, 5]),  # the references of later resumes
        ({"release_train": True, "most_recent_k": 2}, {1, 2, 4}, [2, 4, 5]),  # others serve a restart alone
        ({"release_train": True, "most_recent_k": 1}, {1, 3, 5}, [5]),
    ],
)
def test_checkpoints_for_the_way_back_go_when_the_next_is_whole(
    tmp_path: Path, flags: dict[str, Any], due: set[int], left: list[int]
) -> None:
    passing = TransientCheckpoints(run_args(save=str(tmp_path), **flags))
    for rollout_id in range(6):
        (tmp_path / f"iter_{rollout_id:07d}").mkdir()
        passing.saved(rollout_id, due=rollout_id in due)
        assert (tmp_path / f"iter_{rollout_id:07d}").is_dir()
    assert [int(path.name[5:]) for path in sorted(tmp_path.iterdir())] == left
