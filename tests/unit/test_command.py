"""``slime COMMAND``: what there is, and what is said of what there is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime import __main__ as command
from slime.ray import serving


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "usage: slime COMMAND ...; `slime COMMAND --help` lists its flags"
    assert all(name in printed.out for name in command.COMMANDS)
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "said"), [([], "a command is missing"), (["server"], "unknown command server"), (["--x"], "--x")]
)
def test_a_wrong_command(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert command.main(words) == 2
    printed = capsys.readouterr()
    assert said in printed.err.splitlines()[0]
    assert "serve" in printed.err
    assert printed.out == ""


def test_flags_of_serve_are_read_and_its_exit_status_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def serve(args: object) -> None:
        served.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr("slime.ray.program.configure_logger", lambda prefix: None)
    monkeypatch.setattr("slime.ray.program.handle_sigterm", lambda: None)
    assert command.main(["serve", "--hf-checkpoint", "/m", "--rollout-num-gpus", "3"]) == 130
    assert served[0].serve_only
    assert served[0].rollout_num_gpus == 3


def test_wrong_flags_of_serve_end_with_status_2() -> None:
    words = [sys.executable, "-m", "slime", "serve", "--rollout-num-gpu", "2"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    first, *_, last = ended.stderr.splitlines()
    assert first == "slime: error: unknown flag --rollout-num-gpu; did you mean --rollout-num-gpus?"
    assert last == "`--help WORD` lists the flags that mention WORD."
