"""Programs that are forked from a process with their imports: as if started alone, and independent of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.utils import fork_server
from slime.utils.process_guard import KEEP_ENVIRON, GuardedProcess, spawn
from slime.utils.process_supervisor import parents
from tests.support.distributed import ROOT

PRELOADED = """
import os, random
PID = os.getpid()
"""
PROGRAM = """
import json, os, random, signal, subprocess, sys, tempfile, time
import preloaded_by_test
if __name__ == "__main__":
    verb = sys.argv[1]
    if verb == "say":
        print("imports of", preloaded_by_test.PID)
        print("variables", os.environ.get("COLOR"), os.environ.get("SHAPE"), os.getcwd(), tempfile.gettempdir())
        print("random", random.random())
        print("files", sorted(os.listdir("/proc/self/fd"), key=int)[:-1])
        print("sigterm", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getsid(0) == os.getpid())
    elif verb == "exit":
        sys.exit(json.loads(sys.argv[2]))
    elif verb == "raise":
        raise LookupError("as it happens")
    else:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        print("child", child.pid, flush=True)
        time.sleep(600)
"""


class Server:
    """A server, and the way to start its program."""

    def __init__(self, folder: Path, preload: str = PRELOADED) -> None:
        self.folder = folder
        (folder / "preloaded_by_test.py").write_text(preload)
        (folder / "program_of_test.py").write_text(PROGRAM)
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, **KEEP_ENVIRON, "PYTHONPATH": path, "COLOR": "red"}
        self.path = str(folder / "socket")
        self.process = fork_server.start(
            self.path, "program_of_test", "preloaded_by_test", self.env, ["PYTHONPATH", "COLOR"], ["COLOR_VARIES"]
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def run(self, *words: str, cwd: str | None = None, **env: str) -> GuardedProcess:
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        command = [sys.executable, "-m", "program_of_test", *words]
        return spawn(command, {**self.env, **env}, log, "a program", cwd=cwd, fork_server=self.path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with contextlib.closing(Server(tmp_path)) as made:
        yield made


def wait_for(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return pid in parents()


def child_of(program: GuardedProcess) -> int:
    wait_for(program.last_lines, "the program says what its child is")
    return int(program.last_lines()[-1].split()[1])


def said(program: GuardedProcess) -> dict[str, str]:
    assert program.wait(60) == 0
    return {line.split()[0]: line.partition(" ")[2] for line in program.last_lines()}


def test_a_program_is_as_if_it_had_been_started_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    other = {"SHAPE": "round", "COLOR_VARIES": "yes", "TMPDIR": str(tmp_path / "there")}
    one, two = said(server.run("say")), said(server.run("say", cwd=str(tmp_path / "there"), **other))
    assert one["imports"] == two["imports"] == f"of {server.process.pid}"
    assert one["variables"].startswith("red None ")
    assert two["variables"] == f"red round {tmp_path / 'there'} {tmp_path / 'there'}"
    assert one["random"] != two["random"]
    assert one["files"] == "['0', '1', '2']"
    assert one["sigterm"] == "True True"


@pytest.mark.parametrize(
    ("value", "code", "line"),
    [("0", 0, None), ("3", 3, None), ("null", 0, None), ('"no such file"', 1, "no such file")],
)
def test_exit_codes(server: Server, value: str, code: int, line: str | None) -> None:
    program = server.run("exit", value)
    assert program.wait(60) == code
    assert program.last_lines() == ([line] if line else [])


def test_an_exception_is_in_the_log_and_a_signal_is_a_negative_code(server: Server) -> None:
    program = server.run("raise")
    assert program.wait(60) == 1
    assert program.last_lines(1) == ["LookupError: as it happens"]
    sleeper = server.run("sleep")
    child_of(sleeper)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert sleeper.wait(20) == -signal.SIGKILL


def test_a_stop_ends_the_program_and_what_it_started(server: Server) -> None:
    program = server.run("sleep")
    child = child_of(program)
    assert Path(f"/proc/{program.pid}/cmdline").read_bytes().startswith(f"{sys.executable} -m program_of_test".encode())
    program.stop(0.5)
    assert not alive(program.pid)
    assert not alive(child)
    program.stop(0.5)  # again: nothing to do


def test_it_outlives_the_server_and_the_next_one_imports_by_itself(server: Server) -> None:
    program = server.run("sleep")
    child = child_of(program)
    server.close()
    time.sleep(1.0)
    assert alive(program.pid)
    assert alive(child)
    assert program.poll() is None
    alone = said(server.run("say"))
    assert alone["imports"] != f"of {server.process.pid}"
    program.stop(0.5)
    assert not alive(child)


def test_a_killed_owner_takes_its_program_along_but_not_the_server(server: Server, tmp_path: Path) -> None:
    code = f"""
import sys, time
from slime.utils.process_guard import spawn
env = {server.env!r}
p = spawn([sys.executable, "-m", "program_of_test", "sleep"], env, {str(tmp_path / "owned")!r}, "x",
          fork_server={server.path!r})
while not p.last_lines(): time.sleep(0.02)
print(p.pid, p.last_lines()[-1].split()[1], flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=server.env)
    assert owner.stdout is not None
    with owner.stdout:
        pid, child = map(int, owner.stdout.readline().split())
    assert parents()[parents()[pid]] == server.process.pid
    owner.kill()
    owner.wait(10)
    wait_for(lambda: not alive(pid) and not alive(child), "the end of the program of a killed owner")
    assert said(server.run("say"))["imports"] == f"of {server.process.pid}"


def test_a_killed_supervisor_takes_its_program_along(server: Server) -> None:
    program = server.run("sleep")
    child = child_of(program)
    os.kill(parents()[program.pid], signal.SIGKILL)
    wait_for(lambda: not alive(program.pid), "the end of the program of a killed supervisor")
    assert program.poll() == -signal.SIGKILL
    os.kill(child, signal.SIGKILL)  # it was daemonized, and the supervisor alone knew of it


def test_the_server_ends_with_the_process_that_started_it(server: Server, tmp_path: Path) -> None:
    code = f"""
import time
from slime.utils import fork_server
p = fork_server.start({str(tmp_path / "other")!r}, "program_of_test", "preloaded_by_test", {server.env!r}, ["A"], [])
print(p.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=server.env)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline())
    wait_for((tmp_path / "other").exists, "the server listens")
    owner.kill()
    owner.wait(10)
    wait_for(lambda: not alive(pid), "the end of the server of a killed process")


def test_nothing_is_started_for_a_request_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers late, when whoever asked has started the program by itself."""
    monkeypatch.setattr(fork_server, "REPLY_DEADLINE_S", 0.2)
    slow = f"{PRELOADED}\nimport sys, time\nif 'fork_server' in sys.argv[0]: time.sleep(3)"
    with contextlib.closing(Server(tmp_path, slow)) as server:
        assert said(server.run("say"))["imports"] != f"of {server.process.pid}"
        monkeypatch.undo()
        assert said(server.run("say"))["imports"] == f"of {server.process.pid}"
        texts = [path.read_text() for path in tmp_path.glob("log-*")]
    assert [text.count("imports of") for text in texts] == [1, 1]


@pytest.mark.parametrize(
    ("more", "module", "env", "reason"),
    [
        ("", "program_of_test", {"COLOR": "blue"}, "the imports were done with another environment: COLOR"),
        ("", "json.tool", {}, "expected the command"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "program_of_test", {}, "an import has started a thread",
        ),
        (
            "import sys\nif 'fork_server' in sys.argv[0]: raise ImportError('not here')",
            "program_of_test", {}, "preloaded_by_test cannot be imported: ImportError: not here",
        ),
    ],
    ids=["environment", "command", "thread", "import"],
)  # fmt: skip
def test_what_cannot_be_forked_is_started_alone(
    tmp_path: Path, more: str, module: str, env: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with contextlib.closing(Server(tmp_path, PRELOADED + more)) as server:
        check_started_alone(server, module, env)
    assert reason in caplog.text
    assert "a program imports its packages itself: " in caplog.text


def check_started_alone(server: Server, module: str, env: dict[str, str]) -> None:
    words = ["say"] if module == "program_of_test" else ["--help"]
    command = [sys.executable, "-m", module, *words]
    program = spawn(command, {**server.env, **env}, server.folder / "log", "a program", fork_server=server.path)
    assert program.wait(60) == 0
    assert f"imports of {server.process.pid}" not in program.last_lines()
