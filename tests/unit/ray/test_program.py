"""A run as a program: exit codes, and failures whose cause is the last thing said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.arguments import ArgumentError
from slime.ray.driver import program
from slime.ray.driver.program import run_as_program
from slime.ray.remote import EngineDied, RemoteFailure
from tests.support.arguments import run_args


@pytest.fixture(autouse=True)
def _leave_signals_and_logging_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(program, "configure_logger", lambda prefix: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def test_exit_codes(tmp_path: Path) -> None:
    args = run_args(run_dir=str(tmp_path))
    assert run_as_program(args, lambda: None) == 0
    assert run_as_program(args, raising(ValueError("bad"))) == 1
    assert run_as_program(args, raising(ArgumentError("--x and --y contradict each other"))) == 2
    assert run_as_program(args, raising(KeyboardInterrupt())) == 130
    assert run_as_program(args, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 143


def test_a_termination_that_ray_turns_into_an_interrupt_is_still_one(tmp_path: Path) -> None:
    """Ray's compiled code knows KeyboardInterrupt alone: it stops waiting, and raises a plain one in its place."""

    def wait_in_ray() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    args = run_args(run_dir=str(tmp_path))
    assert issubclass(program.Terminated, KeyboardInterrupt)
    assert run_as_program(args, wait_in_ray) == 143
    assert run_as_program(args, raising(KeyboardInterrupt())) == 130  # of an earlier run nothing is left


def test_the_cause_is_said_last_and_the_story_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = RemoteFailure("ValueError: reward is nan\n  in actor rank 0, during training", "Traceback: here")
    assert run_as_program(run_args(run_dir=str(tmp_path)), raising(failure)) == 1
    said = capsys.readouterr().err.strip().splitlines()
    story = tmp_path / "logs" / "failure.txt"
    assert said[0] == "Traceback: here"
    assert said[-3:] == [
        "error: ValueError: reward is nan",
        "  in actor rank 0, during training",
        f"(details: {story})",
    ]
    assert story.read_text() == f"{failure}\n\nTraceback: here\n"


def test_a_long_message_is_not_buried_under_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "engine 1 exited with 1\n" + "\n".join(f"  | line {i}" for i in range(20))
    assert run_as_program(run_args(run_dir=str(tmp_path)), raising(EngineDied(message))) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: engine 1 exited with 1\n  | line 0\n")
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "logs" / "failure.txt").read_text()


def test_of_a_mistake_in_users_code_only_the_users_lines_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = f'  File "{program.__file__}", line 3, in call\n    call()\n' * 20
    own = '  File "/somewhere/my_rl.py", line 9, in reward\n    return 1 / 0\n           ~~^~~\n'
    details = f"Traceback (most recent call last):\n{ours}{own}ZeroDivisionError: division by zero"
    failure = RemoteFailure("ZeroDivisionError: division by zero\n  in --custom-rm-path 'my_rl.reward'", details)
    assert run_as_program(run_args(run_dir=str(tmp_path)), raising(failure)) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[:4] == ["in your code:", *own.splitlines()]
    assert len(said) == 8
    assert ours in (tmp_path / "logs" / "failure.txt").read_text()


def test_every_mistake_of_prompts_and_hooks_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_as_program(run_args(run_dir=None), raising(ArgumentError("one\ntwo"))) == 2
    program_name = Path(sys.argv[0]).name
    assert capsys.readouterr().err == f"{program_name}: error: one\n{program_name}: error: two\n"


def test_wrong_flags_found_late_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = run_args(run_dir=str(tmp_path))
    assert run_as_program(args, raising(ArgumentError("--bf16 needs a GPU; leave it out"))) == 2
    assert capsys.readouterr().err == f"{Path(sys.argv[0]).name}: error: --bf16 needs a GPU; leave it out\n"
    assert not (tmp_path / "logs").exists()


def test_a_failure_before_there_is_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_as_program(run_args(run_dir=None), raising(OSError("disk full"))) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: OSError: disk full"


def test_a_mistyped_flag_does_not_wait_for_ray() -> None:
    root = Path(__file__).resolve().parents[3]
    code = "import sys, train, train_async; assert 'ray' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


def test_secrets_of_a_failure_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = run_args(run_dir=str(tmp_path), wandb_key="of-wandb")
    assert run_as_program(args, raising(ValueError("no answer from https://u:hush@h for of-wandb"))) == 1
    kept = (tmp_path / "logs" / "failure.txt").read_text() + capsys.readouterr().err
    assert "https://***@h" in kept
    assert not [word for word in ("hush", "of-wandb") if word in kept]
