"""Output for people never ends a run: a full disk, a directory that is gone, a tracker that fails."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.observability import best_effort, logging_utils, run_dir, samples, tracking
from slime.observability.best_effort import Files, Lines, output
from slime.observability.logging_utils import TensorBoardWriter
from slime.observability.tracking import Tracker
from slime.ray.driver.program import run_as_program
from slime.utils.types import Sample
from tests.support import small_disk
from tests.support.arguments import run_args

needs_mount = pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))
REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES, errno.ENAMETOOLONG, errno.EIO)


class Disk:
    """A disk for ``os.write`` with room for so many bytes, then an error."""

    def __init__(self, room: int, reason: int) -> None:
        self.room, self.reason = room, reason
        self._write = os.write

    def write(self, fd: int, data: Any) -> int:
        if self.room <= 0:
            raise OSError(self.reason, os.strerror(self.reason))
        written = self._write(fd, bytes(data)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: errno.errorcode[reason])
def test_metrics_wait_for_room_and_none_is_lost_or_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: int
) -> None:
    tracker = Tracker()
    monkeypatch.setattr(tracking, "_tracker", tracker)
    logging_utils.init_tracking(run_args(run_dir=str(tmp_path)))
    dice, disk = random.Random(reason), Disk(0, reason)
    monkeypatch.setattr(os, "write", disk.write)
    for step in range(200):
        disk.room = dice.choice([0, 1, 50, 500, 5000])
        logging_utils.log(None, {"train/step": step, "train/loss": step / 8, "train/n": -step}, "train/step")
    disk.room = 1 << 20
    logging_utils.finish_tracking()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["name"], row["value"]) for row in rows] == [
        (step, name, value) for step in range(200) for name, value in (("train/loss", step / 8), ("train/n", -step))
    ]
    assert f"metrics cannot be written to {tmp_path}/metrics.jsonl" in caplog.text
    assert "MiB are free there" in caplog.text


def test_one_warning_per_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    lines = Lines("metrics", tmp_path / "x")
    disk = Disk(0, errno.ENOSPC)
    monkeypatch.setattr(os, "write", disk.write)
    for _ in range(10):
        lines.write(b"1\n")
    disk.room = 100
    lines.write(b"1\n")
    assert [record.getMessage().partition(" to ")[0] for record in caplog.records] == [
        "metrics cannot be written", "metrics can be written",
    ]  # fmt: skip
    lines.close()
    assert (tmp_path / "x").read_bytes() == b"1\n" * 11


def test_what_waits_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(best_effort, "MAX_BYTES", 40)
    lines = Lines("metrics", tmp_path / "x")
    disk = Disk(5, errno.ENOSPC)
    monkeypatch.setattr(os, "write", disk.write)
    for number in range(10):
        lines.write(b"line %03d\n" % number)
    disk.room = 1 << 20
    lines.close()
    assert (tmp_path / "x").read_text().splitlines() == ["line 000", "line 007", "line 008", "line 009"]
    assert f"6 lines of {tmp_path}/x could not be written and are lost" in caplog.text


def test_a_directory_that_cannot_be_made_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file in the way")
    lines = Lines("metrics", tmp_path / "run" / "metrics.jsonl")
    lines.write(b"1\n")
    (tmp_path / "run").unlink()
    lines.write(b"2\n")
    lines.close()
    assert (tmp_path / "run/metrics.jsonl").read_text() == "1\n2\n"
    assert "metrics cannot be written" in caplog.text


def test_a_tracker_that_fails_ends_nothing_and_keeps_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def write(self, *_: Any) -> None:
            raise ConnectionError("the server is away")

        def close(self) -> None:
            raise RuntimeError("still away")

    written: list[Any] = []

    class Whole:
        def write(self, step_key: str, step: int, metrics: Any, timestamp: float) -> None:
            written.append((step, dict(metrics)))

        def close(self) -> None:
            written.append("closed")

    tracker = Tracker()
    monkeypatch.setattr(tracking, "_tracker", tracker)
    tracker.open([Broken(), Whole()])
    for step in range(3):
        logging_utils.log(None, {"train/step": step, "train/loss": 1.0}, "train/step")
    tracker.close()
    assert written == [*((step, {"train/loss": 1.0}) for step in range(3)), "closed"]
    assert (
        caplog.text.count("Broken cannot write metrics, and the run continues: ConnectionError: the server is away")
        == 1
    )


def test_tensorboard_continues_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TensorBoardWriter(str(tmp_path))

    class Full:
        def add_event(self, _: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer._events.close()
    monkeypatch.setattr(writer, "_events", Full())
    with pytest.raises(OSError, match="No space"):
        writer.write("train/step", 1, {"train/loss": 1.0}, 0.0)
    writer.write("train/step", 2, {"train/loss": 1.0}, 0.0)
    writer.close()


def samples_of(count: int) -> list[Sample]:
    return [Sample(index=i, prompt="1+1=", response="2") for i in range(count)]


def test_samples_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(samples, "_files", Files("samples"))
    args = run_args(run_dir=str(tmp_path))
    (tmp_path / "samples").write_text("in the way")
    for rollout in range(3):
        samples.write(args, rollout, samples_of(2))
    assert caplog.text.count("samples cannot be written") == 1
    (tmp_path / "samples").unlink()
    samples.write(args, 3, samples_of(2))
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [f"{n}.jsonl" for n in range(4)]


def test_printing_to_a_full_log_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = output(fd, "the log", tmp_path / "log")
    handler = logging.StreamHandler(stream)  # the complaint goes to the same file
    logging.getLogger().addHandler(handler)
    disk = Disk(3, errno.ENOSPC)
    monkeypatch.setattr(os, "write", disk.write)
    try:
        print("a reward function says something", file=stream)
        logging.getLogger("x").warning("so does a library")
        disk.room = 1 << 20
        print("and again", file=stream)
    finally:
        logging.getLogger().removeHandler(handler)
    assert caplog.text.count("the log cannot be written") == 1
    assert "and again\n" in (tmp_path / "log").read_text()
    os.close(fd)


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: errno.errorcode[reason])
def test_the_report_of_a_failure_never_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: int
) -> None:
    from slime.ray.driver import program

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    def body() -> None:
        raise ValueError("the reward is no number")

    monkeypatch.setattr(program, "configure_logger", lambda prefix: None)
    monkeypatch.setattr(program, "write_atomically", fails)
    assert run_as_program(run_args(run_dir=str(tmp_path)), body) == 1
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-2:]
    assert last[0] == "error: ValueError: the reward is no number"
    assert last[1].startswith(f"(the details cannot be written to {tmp_path}/logs/failure.txt: {os.strerror(reason)} (")
    assert "During handling" not in said
    assert "ValueError: the reward is no number" in said.partition("error: ")[0]  # the traceback is not lost


def test_a_terminal_that_is_gone_does_not_hide_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.ray.driver import program

    def body() -> None:
        raise ValueError("x")

    monkeypatch.setattr(program, "configure_logger", lambda prefix: None)

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full())
        code = run_as_program(run_args(run_dir=str(tmp_path)), body)
    assert code == 1


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_run_starts_in_a_full_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: int
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(reason, f"x: {os.strerror(reason)}")

    monkeypatch.setattr(run_dir, "write_atomically", fails)
    assert run_dir.prepare(run_args(run_dir=f"{tmp_path}/run")) == tmp_path / "run"
    assert "the run directory cannot be written, and the run continues" in caplog.text


def test_a_run_directory_that_is_no_place_to_write_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file/run", "x" * 400):
        with pytest.raises(OSError, match=f"--run-dir {tmp_path}/{name[:20]}.* cannot be written"):
            run_dir.prepare(run_args(run_dir=f"{tmp_path}/{name}"))


FILLED = """
import os, sys
from pathlib import Path
from slime.observability import logging_utils, run_dir, samples
from slime.utils.types import Sample
from tests.support.arguments import run_args
folder = Path(sys.argv[1])
args = run_args(run_dir=f"{folder}/run")
logging_utils.configure_logger("driver")
run_dir.prepare(args)
logging_utils.init_tracking(args)
filler = folder / "filler"
with open(filler, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for step in range(50):
    logging_utils.log(args, {"train/step": step, "train/loss": 1.0}, "train/step")
    samples.write(args, step, [Sample(index=0, prompt="p" * 5000, response="r")])
assert len(list((folder / "run/samples").iterdir())) < 50
filler.unlink()
logging_utils.log(args, {"train/step": 50, "train/loss": 1.0}, "train/step")
samples.write(args, 50, [Sample(index=0, prompt="p", response="r")])
logging_utils.finish_tracking(args)
print(len((folder / "run/metrics.jsonl").read_text().splitlines()), len(list((folder / "run/samples").iterdir())))
"""


@needs_mount
def test_a_disk_that_fills_up_and_has_room_again(tmp_path: Path) -> None:
    done = small_disk.run(tmp_path / "disk", "1m", FILLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["51", "51"]
    assert done.stderr.count("cannot be written to") == 2  # metrics and samples, once each
    assert f"{tmp_path}/disk/run/samples" in done.stderr
    assert "(0 MiB are free there)" in done.stderr
