"""``slime COMMAND``: what there is, and what is said of what there is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime import __main__ as command
from slime.ray.driver import engines_command, serving


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
    monkeypatch.setattr("slime.ray.driver.program.configure_logger", lambda prefix: None)
    monkeypatch.setattr("slime.ray.driver.program.handle_sigterm", lambda: None)
    assert command.main(["serve", "--hf-checkpoint", "someone/model", "--rollout-num-gpus", "3"]) == 130
    assert served[0].serve_only
    assert served[0].rollout_num_gpus == 3


class Manager:
    """A manager that answers what the test says; ``calls`` are its methods with what they were given."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.calls.append((name, *given)) or self.answers[name])


@pytest.mark.parametrize(
    ("words", "answers", "call", "said"),
    [
        (["add"], {"add_engines": [3]}, ("add_engines", None, 1, None), "being started: engine 3\n"),
        (
            ["add", "--model", "judge", "--count", "2", "--worker-type", "decode"],
            {"add_engines": [3, 4]},
            ("add_engines", "judge", 2, "decode"),
            "being started: engine 3, engine 4\n",
        ),
        (["drain", "1"], {"drain_engines": 0}, ("drain_engines", [1], None), "drained: engine 1\n"),
        (
            ["remove", "1", "2", "--timeout", "5"],
            {"remove_engines": 7},
            ("remove_engines", [1, 2], 5.0),
            "removed: engine 1, engine 2; 7 requests were aborted, and are sent to the others\n",
        ),
        (
            ["list"],
            {"deployment": {"judge": {"router": "http://r", "engines": []}}},
            ("deployment",),
            "model  router    engine  url  type  slots  state\njudge  http://r  none\n",
        ),
    ],
)
def test_engines_of_a_run_in_progress(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    answers: Any,
    call: Any,
    said: str,
) -> None:
    manager = Manager(**answers)
    monkeypatch.setattr(engines_command.cluster, "manager_of_run", lambda directory: manager)
    monkeypatch.setattr(engines_command.ray, "get", lambda answer, timeout: answer)
    assert command.main(["engines", *words, "--run-dir", "/run"]) == 0
    assert capsys.readouterr().out == said
    assert manager.calls == [call]


@pytest.mark.parametrize(("words", "limit"), [(["list"], 1800), (["drain", "1", "--timeout", "7200"], 9000)])
def test_a_manager_that_does_not_answer_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], limit: int
) -> None:
    def never(answer: Any, timeout: float = 0.0) -> Any:
        raise engines_command.ray.exceptions.GetTimeoutError(str(timeout))

    manager = Manager(deployment={}, drain_engines=0)
    monkeypatch.setattr(engines_command.cluster, "manager_of_run", lambda directory: manager)
    monkeypatch.setattr(engines_command.ray, "get", never)
    assert command.main(["engines", *words, "--run-dir", "/run"]) == 1
    said = capsys.readouterr().err
    assert f"error: the manager of the run in /run has not answered for {limit} s. What was asked for may still" in said


def test_engines_of_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manager.json").write_text(
        '{"ray_address": "127.0.0.1:1", "ray_auth_mode": null, "name": "manager", "namespace": "slime-1"}'
    )
    for directory in (tmp_path, tmp_path / "missing"):
        assert command.main(["engines", "list", "--run-dir", str(directory)]) == 1
        assert "no run in progress is found through" in capsys.readouterr().err


def test_wrong_flags_of_serve_end_with_status_2() -> None:
    words = [sys.executable, "-m", "slime", "serve", "--rollout-num-gpu", "2"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    first, *_, last = ended.stderr.splitlines()
    assert first == "slime: error: unknown flag --rollout-num-gpu; did you mean --rollout-num-gpus?"
    assert last == "`--help WORD` lists the flags that mention WORD."
