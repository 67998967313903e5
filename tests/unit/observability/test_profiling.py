"""Traces of the rollouts and phases that were asked for, and memory records that begin and end where they should."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slime.observability import profiling
from slime.observability.profiling import Profiling, TorchProfile, profile_dir
from slime.observability.timer import Timers
from tests.support.arguments import run_args


class Trace:
    """Stands for torch's profiler, whose own start takes seconds; the integration tests use the real one."""

    running = False

    def __enter__(self) -> None:
        assert not Trace.running, "torch runs one profiler at a time"
        Trace.running = True

    def __exit__(self, *_: Any) -> None:
        Trace.running = False

    def export_chrome_trace(self, path: str) -> None:
        assert not Trace.running
        Path(path).write_text("trace")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_profiler", Trace)


def train(args: Namespace, rollouts: int) -> None:
    timers = Timers()
    profile = TorchProfile(args, rank=3, role="actor")
    timers.watch("profile", profile)
    for rollout_id in range(rollouts):
        profile.rollout_id = rollout_id
        with timers.measure("train"):
            with timers.measure("log_probs"):
                pass
            with timers.measure("actor_train"):
                pass


def profile_args(folder: Path, targets: list[str]) -> Namespace:
    return run_args(
        use_pytorch_profiler=True,
        profile_ranks=[3],
        profile_target=targets,
        profile_step_start=1,
        profile_step_end=3,
        run_dir=str(folder),
    )


@pytest.mark.parametrize(
    ("targets", "traced"),
    [
        (["train_overall"], ["train_overall"]),
        (["train_actor", "train_overall"], ["train_overall"]),  # the outer one holds the inner one
        (["train_log_probs"], ["train_log_probs"]),
        (["train_log_probs", "train_actor"], ["train_actor", "train_log_probs"]),
    ],
)
def test_targets_are_traced_in_the_rollouts_of_the_window(
    tmp_path: Path, targets: list[str], traced: list[str]
) -> None:
    train(profile_args(tmp_path, targets), 4)
    expected = [f"{what}_rollout{i}_actor_rank3.pt.trace.json.gz" for what in traced for i in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == expected


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = profile_args(tmp_path, ["train_overall"])
    (tmp_path / "profile").write_text("a file where the directory should be")
    train(args, 2)
    assert "could not be written" in caplog.text


def test_the_directory_is_the_one_given() -> None:
    assert profile_dir(run_args(run_dir="r")) == Path("r/profile")
    assert profile_dir(run_args(run_dir="r", tensorboard_dir="tb")) == Path("tb")


@pytest.fixture
def memray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the package, which is optional."""
    log: list[str] = []

    class Tracker:
        def __init__(self, path: str, native_traces: bool) -> None:
            assert native_traces
            self.path = path

        def __enter__(self) -> None:
            log.append(f"start {Path(self.path).name}")

        def __exit__(self, *_: Any) -> None:
            log.append("stop")

    module = ModuleType("memray")
    module.Tracker = Tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memray", module)
    return log


def memory_args(folder: Path, **flags: Any) -> Namespace:
    given = {"record_memory_history": True, "memory_recorder": "memray", "memory_snapshot_num_steps": 2, **flags}
    return run_args(memory_snapshot_dir=str(folder), memory_snapshot_path="mine.bin", **given)


def test_memory_is_recorded_for_so_many_rollouts(tmp_path: Path, memray: list[str]) -> None:
    profiling = Profiling(memory_args(tmp_path), rank=5, role="actor")
    assert len(memray) == 1
    assert memray[0].startswith("start memory_snapshot_time")
    assert memray[0].endswith("_rank5_mine.bin")
    for rollout_id in range(4):
        profiling.begin(rollout_id)
        profiling.trained()
        assert memray[1:] == (["stop"] if rollout_id >= 1 else [])
    profiling.end()
    assert memray[1:] == ["stop"]


def test_a_shorter_run_ends_the_record(tmp_path: Path, memray: list[str]) -> None:
    profiling = Profiling(memory_args(tmp_path), rank=0, role="actor")
    profiling.trained()
    profiling.end()
    assert memray[1:] == ["stop"]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memray", None)
    with pytest.raises(ImportError, match="pip install memray"):
        Profiling(memory_args(tmp_path), rank=0, role="actor")


@pytest.mark.gpu
def test_torch_records_the_memory_of_a_gpu(tmp_path: Path) -> None:
    args = memory_args(tmp_path, memory_recorder="torch", memory_snapshot_num_steps=1)
    profiling = Profiling(args, rank=0, role="actor")
    kept = torch.ones(1 << 20, device="cuda")
    profiling.trained()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size > 0
    assert kept.numel()
