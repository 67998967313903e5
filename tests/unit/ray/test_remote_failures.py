"""Failures cross process boundaries with the original message first and nothing of Ray's machinery."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import ray.exceptions

from slime.ray.remote import (
    EngineDied,
    RemoteFailure,
    clean_traceback,
    describe,
    is_secondary,
    last_lines,
    one_line_kind,
    reports_errors,
)
from tests.support.fake_ray import remote


class Unpicklable(Exception):
    def __init__(self, number: int, thing: object) -> None:
        super().__init__(f"number {number}")
        self.thing = thing


class Actor:
    @reports_errors
    def work(self, error: Exception | None, *, value: int = 0) -> int:
        """Do it."""
        if error is not None:
            raise error
        return value


def test_results_and_docstrings_pass_through() -> None:
    assert Actor().work(None, value=3) == 3
    assert Actor.work.__name__ == "work"
    assert Actor.work.__doc__ == "Do it."


def test_any_exception_becomes_one_that_travels() -> None:
    with pytest.raises(RemoteFailure) as raised:
        Actor().work(Unpicklable(3, lambda: None))
    arrived = pickle.loads(pickle.dumps(raised.value))
    assert str(arrived) == "Unpicklable: number 3"
    assert "Unpicklable" in arrived.details
    assert "raise error" in arrived.details  # the line that raised
    assert "return method(" not in arrived.details  # not the decorator's


def test_failures_that_travel_already_are_left_alone() -> None:
    for error in (RemoteFailure("ValueError: x", "trace"), EngineDied("engine 0 exited with 1")):
        with pytest.raises(type(error)) as raised:
            Actor().work(error)
        assert raised.value is error


def test_interrupts_are_no_failures() -> None:
    class Interrupting:
        @reports_errors
        def work(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupting().work()


def test_one_line_kind_finds_the_root() -> None:
    assert one_line_kind(ValueError("bad")) == "ValueError: bad"
    assert one_line_kind(ValueError()) == "ValueError"
    assert one_line_kind(remote(ValueError("bad"))) == "ValueError: bad"
    assert one_line_kind(remote(RemoteFailure("KeyError: 'x'"))) == "KeyError: 'x'"
    assert one_line_kind(EngineDied("engine 0 exited with 1")) == "engine 0 exited with 1"


def test_the_traceback_keeps_causes() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as e:
            raise ValueError("second") from e

    try:
        fail()
    except ValueError as e:
        text = clean_traceback(e)
    assert text.index("KeyError: 'first'") < text.index("ValueError: second")
    assert "raise KeyError" in text


def test_describe_says_what_who_when_and_where_it_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "actor_rank1.log"
    failure = describe(remote(RemoteFailure("ValueError: bad mask", "its trace")), "actor rank 1", "training", log)
    assert str(failure) == f"ValueError: bad mask\n  in actor rank 1, during training\n  log: {log}"
    assert failure.details == "its trace"


def test_describe_does_not_repeat_a_name_that_the_message_has() -> None:
    failure = describe(remote(RemoteFailure("EngineStartError: engine 1 is not ready")), "engine 1", "starting", None)
    assert str(failure) == "EngineStartError: engine 1 is not ready"


def test_describe_of_a_call_that_timed_out() -> None:
    failure = describe(ray.exceptions.GetTimeoutError("Get timed out"), "engine 0", "starting", None)
    assert str(failure).startswith("engine 0 did not answer during starting")


def test_an_actor_that_died_is_reported_in_one_line() -> None:
    paragraph = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainRayActor\n\tactor_id: 0123\n"
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2.\n"
        "Some common causes include: (1) the process was killed by the OOM killer."
    )
    failure = describe(ray.exceptions.RayActorError(error_msg=paragraph), "actor rank 0", "training", None)
    assert len(str(failure).splitlines()) == 1
    assert "Worker unexpectedly exits with a connection error code 2" in str(failure)
    assert "OOM killer" not in str(failure)


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        ("[gloo] Connection closed by peer [127.0.0.1]:4711", True),
        ("Connection reset by peer", True),
        ("Broken pipe", True),
        ("bad mask", False),
        ("CUDA out of memory", False),
    ],
)
def test_consequences_are_distinguished_from_causes(text: str, secondary: bool) -> None:
    with pytest.raises(RemoteFailure) as raised:
        Actor().work(RuntimeError(text))
    assert is_secondary(remote(raised.value)) is secondary
    assert is_secondary(remote(RuntimeError(text))) is secondary  # of a method that is no actor's of the run
    assert not is_secondary(remote(RemoteFailure(text)))  # whoever wrote this knows better


def test_last_lines_of_a_long_log_that_is_no_clean_text(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * 100_000 + b"\nbroken \xff byte\nlast\n")
    text = last_lines(log, n=2)
    assert text.splitlines()[1:] == [f"The last lines of {log}:", "  | broken � byte", "  | last"]
    assert last_lines(tmp_path / "absent.log") == ""
    assert last_lines(None) == ""
