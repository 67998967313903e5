"""Failures are told with their cause first; programs end with the right code."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from slime.ray.cluster import device_of_cluster, slot_resources
from slime.ray.errors import (
    EngineDied,
    RemoteFailure,
    clean_traceback,
    describe,
    is_secondary,
    one_line_kind,
    reports_errors,
)
from slime.ray.program import run_as_program


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


@reports_errors
def method(kind: type[BaseException], *args: object) -> None:
    raise kind(*args)


def test_any_exception_travels():
    with pytest.raises(RemoteFailure) as raised:
        method(Unpicklable, 1, 2)
    travelled = pickle.loads(pickle.dumps(raised.value))
    assert str(travelled) == "Unpicklable: 1 is not 2"
    assert "in method" in travelled.details
    assert "slime/ray/errors.py" not in travelled.details


@pytest.mark.parametrize("kind", [EngineDied, RemoteFailure])
def test_failures_that_can_travel_stay_as_they_are(kind):
    with pytest.raises(kind, match="engine 3 has ended"):
        method(kind, "engine 3 has ended")


def test_ctrl_c_is_not_a_failure_to_report():
    with pytest.raises(KeyboardInterrupt):
        method(KeyboardInterrupt)


def test_the_cause_comes_first_then_where():
    failure = describe(ValueError("mask length 3 != 4"), "actor rank 1", "training on rollout 7", Path("/x/log"))
    assert str(failure).splitlines() == [
        "ValueError: mask length 3 != 4",
        "  in actor rank 1, during training on rollout 7",
        "  log: /x/log",
    ]


def test_kinds():
    assert one_line_kind(ValueError("a")) == "ValueError: a"
    assert one_line_kind(ValueError()) == "ValueError"
    assert one_line_kind(EngineDied("engine 0 ended")) == "engine 0 ended"


def test_the_cause_of_a_cause_is_in_the_details():
    try:
        try:
            raise KeyError("inner")
        except KeyError as e:
            raise ValueError("outer") from e
    except ValueError as e:
        details = clean_traceback(e)
    assert details.index("inner") < details.index("outer")


def test_consequences_are_told_from_causes():
    assert is_secondary(RuntimeError("pair.cc:537 Read error: Connection reset by peer"))
    assert not is_secondary(ValueError("sample index=3 has no reward"))


def test_device_of_the_cluster():
    assert device_of_cluster({"CPU": 2.0}, None) == "cpu"
    assert device_of_cluster({"CPU": 2.0, "GPU": 8.0}, None) == "cuda"
    assert device_of_cluster({"CPU": 2.0, "GPU": 8.0}, "cpu") == "cpu"
    assert slot_resources("cuda", has_slots=False) == {"GPU": 1.0, "CPU": 1.0}
    assert slot_resources("cpu", has_slots=True) == {"slime_slot": 1.0}
    assert slot_resources("cpu", has_slots=False) == {"CPU": 0.01}


@pytest.fixture
def _signal_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signal_handler")
def test_exit_codes(tmp_path, capsys):
    args = Namespace(run_dir=str(tmp_path))

    def fail() -> None:
        raise RemoteFailure("ValueError: reward is nan", "Traceback: here")

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run_as_program(args, lambda: None) == 0
    assert run_as_program(args, interrupt) == 130
    assert run_as_program(args, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143
    capsys.readouterr()
    assert run_as_program(args, fail) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0] == "Traceback: here"
    assert said[-2] == "error: ValueError: reward is nan"
    assert (tmp_path / "logs" / "failure.txt").read_text() == "ValueError: reward is nan\n\nTraceback: here\n"


def test_a_mistyped_flag_does_not_wait_for_ray():
    root = Path(__file__).resolve().parents[3]
    code = "import sys, train; assert 'ray' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
