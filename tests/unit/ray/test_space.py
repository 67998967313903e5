"""A need for space is named with the free space; a bus error names shared memory; a stopped process is named."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.errors import ArgumentError
from slime.backends.sglang_utils.engine import EngineProcess
from slime.ray import remote, space
from slime.ray.remote import StoppedProcesses, describe
from slime.utils import shared_memory
from slime.utils.process_guard import spawn
from tests.support import small_disk
from tests.support.arguments import run_args

Usage = namedtuple("Usage", "total used free")
needs_mount = pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """MiB that are free, by beginning of the path."""
    room = {"/dev/shm": 1000, "/": 10_000}

    def disk_usage(path: object) -> Usage:
        mib = next(mib for start, mib in room.items() if str(path).startswith(start))
        return Usage(64 << 20, 0, mib << 20)

    monkeypatch.setattr(space.shutil, "disk_usage", disk_usage)
    return room


def test_the_start_names_what_is_needed_and_what_is_free(
    tmp_path: Path, free: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    args = run_args(
        hf_checkpoint=str(tmp_path), save=f"{tmp_path}/x/save", save_interval=1, run_dir=str(tmp_path),
        update_weight_transport="disk", update_weight_disk_dir=f"{tmp_path}/w",
    )  # fmt: skip
    space.look(args)
    said = [record.getMessage() for record in caplog.records]
    assert f"--save {tmp_path}/x/save: 9.8 GiB free, of which about 0.0 GiB are needed at a time" in said
    assert f"--run-dir {tmp_path}: 9.8 GiB free" in said
    assert "shared memory: /dev/shm has 1000 of 64 MiB free" in said
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    free["/"] = 20  # less than the 21 of a checkpoint with its optimizer, more than the 3 of weights
    space.look(args)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [warning.partition(" ")[0] for warning in warnings] == ["--save", "temporary"]
    assert warnings[0].startswith(f"--save {tmp_path}/x/save: 0.0 GiB free, of which about")


def test_little_shared_memory_is_said_and_too_little_refused(
    free: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    free["/dev/shm"] = 60
    space.look(run_args())
    assert "/dev/shm has 60 of 64 MiB free" in caplog.text
    free["/dev/shm"] = 3
    with pytest.raises(ArgumentError, match=r"/dev/shm has 3 of 64 MiB free.*at least 16: .*--shm-size"):
        space.look(run_args())


@needs_mount
def test_a_full_shared_memory_is_refused_at_the_start() -> None:
    code = """
from slime.ray import space
from tests.support.arguments import run_args
space.look(run_args())
"""
    done = small_disk.run(Path("/dev/shm"), "8m", code)
    assert "ArgumentError: /dev/shm has 8 of 8 MiB free" in done.stderr


@pytest.mark.parametrize(
    "said",
    ["Rank 0 scheduler died during initialization (exit code: -7)", "Fatal Python error: Bus error", "x SIGBUS y",
     "engine 0 (pid 3) was ended by signal 7."],
)  # fmt: skip
def test_a_bus_error_names_shared_memory(free: dict[str, int], said: str) -> None:
    assert "/dev/shm has 1000 of 64 MiB free" in shared_memory.hint(said)
    assert "--shm-size" in shared_memory.hint(said)


@pytest.mark.parametrize("said", ["exit code: -9", "signal 11", "exit code: -77", "a bus, an error"])
def test_other_ends_name_it_only_when_it_is_full(free: dict[str, int], said: str) -> None:
    assert shared_memory.hint(said) == ""
    free["/dev/shm"] = 3
    assert "shared memory: /dev/shm has 3 of 64 MiB free" in shared_memory.hint(said)


def test_the_end_of_a_trainer_by_a_bus_error(tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    (tmp_path / "log").write_text("Fatal Python error: Bus error\n")
    failure = describe(RayActorError(), "actor rank 0", "training", tmp_path / "log")
    assert "/dev/shm has" in str(failure)


def test_the_end_of_an_engine_by_a_bus_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineProcess.__new__(EngineProcess)
    engine.name, engine.log_path = "engine 0", tmp_path / "log"
    code = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    engine._process = spawn([sys.executable, "-c", code], None, engine.log_path, "engine 0")
    monkeypatch.setattr(EngineProcess, "info", SimpleNamespace(url="http://x"))
    engine._process.wait(60)
    said = engine.poll()
    assert said is not None
    assert "was ended by signal 7" in said
    assert "/dev/shm has" in said


def test_a_stopped_process_is_named_once_per_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "LOOK_EVERY_S", 0.0)
    log = tmp_path / "actor_rank0.log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=out)
    watch = StoppedProcesses()

    def wait_for(state: str) -> None:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def warnings() -> int:
        for _ in range(3):
            watch.look("training on rollout 3", [("actor rank 0", log), ("actor rank 1", tmp_path / "other.log")])
        return caplog.text.count(
            f"training on rollout 3 waits for actor rank 0, whose process {process.pid} is stopped"
        )

    try:
        assert warnings() == 0
        for number in (1, 2):
            os.kill(process.pid, signal.SIGSTOP)
            wait_for("T")
            assert warnings() == number
            os.kill(process.pid, signal.SIGCONT)
            wait_for("S")
            assert warnings() == number
    finally:
        process.kill()
        process.wait()
