"""A guarded command and all it starts end with their owner, whatever ends the owner. Real, small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.utils import process_supervisor
from slime.utils.process_guard import ProcessStartError, spawn, start_janitor
from tests.support import small_disk

# A command that leaves a daemon behind: forked twice, in a session of its own, deaf to SIGTERM and SIGHUP.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""

OWNER = """
import sys, time
from slime.utils.process_guard import spawn
p = spawn([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2], "600"], None, sys.argv[3], "the daemon's parent")
print(p.pid, flush=True)
time.sleep(600)
"""

SELF_GUARDED = """
import subprocess, sys, time
from slime.utils.process_guard import guard_self
guard_self(); guard_self()
p = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2], "0"])
print(p.wait(), flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    return pid in process_supervisor.parents()


def wait_for(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def read_pid(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text(), 20, f"{path} is written")
    return int(path.read_text())


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *args]


def test_exit_code_and_log(tmp_path):
    (tmp_path / "log").write_text("an earlier process\n")
    p = spawn(python("print('one'); print('two'); raise SystemExit(7)"), None, tmp_path / "log", "a command")
    assert p.wait(20) == 7
    assert p.poll() == 7
    assert p.last_lines(1) == ["two"]
    assert p.last_lines(9) == ["one", "two"]


def test_signal_is_a_negative_code(tmp_path):
    p = spawn(python("import time; time.sleep(600)"), None, tmp_path / "log", "a command")
    assert p.poll() is None
    os.kill(p.pid, signal.SIGKILL)
    assert p.wait(20) == -signal.SIGKILL


def test_environment_is_the_given_one_and_cwd(tmp_path):
    code = "import os; print(os.environ.get('A'), os.environ.get('HOME'), os.getcwd())"
    p = spawn(python(code), {"A": "b"}, tmp_path / "log", "a command", cwd=str(tmp_path))
    assert p.wait(20) == 0
    assert p.last_lines() == [f"b None {tmp_path}"]


def test_command_that_does_not_exist(tmp_path):
    with pytest.raises(ProcessStartError, match=r"cannot start the engine: .*no-such-program"):
        spawn(["/no-such-program"], None, tmp_path / "log", "the engine")


def test_stop_is_gentle_first(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); time.sleep(600)"
    )
    p = spawn(python(code), None, tmp_path / "log", "a command")
    wait_for(p.last_lines, 20, "the command is up")
    assert p.stop(20) == 3


def test_stop_kills_what_ignores_it_and_its_daemons(tmp_path):
    p = spawn(python(DAEMON, str(tmp_path / "pid"), "600"), None, tmp_path / "log", "a command")
    daemon = read_pid(tmp_path / "pid")
    assert alive(daemon)
    started = time.monotonic()
    p.stop(0.5)
    assert time.monotonic() - started < 10
    assert not alive(daemon)
    assert not alive(p.pid)
    p.stop(0.5)  # again: nothing to do


def test_daemon_ends_when_the_command_exits(tmp_path):
    p = spawn(python(DAEMON, str(tmp_path / "pid"), "0"), None, tmp_path / "log", "a command")
    daemon = read_pid(tmp_path / "pid")
    assert p.wait(20) == 0
    wait_for(lambda: not alive(daemon), 15, "the daemon has ended")


@pytest.mark.parametrize("end_owner", [signal.SIGKILL, signal.SIGTERM])
def test_owner_ended_by_a_signal(tmp_path, end_owner):
    args = [DAEMON, str(tmp_path / "pid"), str(tmp_path / "log")]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *args], stdout=subprocess.PIPE, text=True)
    command = int(owner.stdout.readline())
    daemon = read_pid(tmp_path / "pid")
    assert alive(command)
    os.kill(owner.pid, end_owner)
    owner.communicate(timeout=20)
    wait_for(lambda: not alive(command) and not alive(daemon), 15, "command and daemon have ended")


def test_fork_of_the_owner_does_not_keep_the_command(tmp_path):
    """A fork holds copies of the owner's sockets, so that the supervisor sees no end-of-file."""
    code = OWNER.replace("print(p.pid", "import os\nfork = os.fork()\nif not fork: time.sleep(600)\nprint(p.pid, fork")
    args = [DAEMON, str(tmp_path / "pid"), str(tmp_path / "log")]
    owner = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    command, fork = map(int, owner.stdout.readline().split())
    owner.kill()
    try:
        wait_for(lambda: not alive(command), 15, "the command has ended")
        assert alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
    owner.communicate(timeout=20)


def test_killed_supervisor_takes_the_command_with_it(tmp_path):
    p = spawn(python("import time; time.sleep(600)"), None, tmp_path / "log", "a command")
    os.kill(process_supervisor.parents()[p.pid], signal.SIGKILL)
    assert p.wait(20) == -signal.SIGKILL
    wait_for(lambda: not alive(p.pid), 10, "the command has ended")


def test_guard_self_ends_daemons_of_a_killed_process(tmp_path):
    args = [DAEMON, str(tmp_path / "pid")]
    owner = subprocess.Popen([sys.executable, "-c", SELF_GUARDED, *args], stdout=subprocess.PIPE, text=True)
    assert int(owner.stdout.readline()) == 0
    daemon = read_pid(tmp_path / "pid")
    assert alive(daemon)
    owner.kill()
    owner.communicate(timeout=20)
    wait_for(lambda: not alive(daemon), 15, "the daemon has ended")


def test_janitor_ends_only_what_carries_the_tag(tmp_path):
    janitor = start_janitor("SLIME_TEST_TAG=mine")
    code = "import time; time.sleep(600)"
    children = {
        tag: subprocess.Popen(python(code), env={"SLIME_TEST_TAG": tag, "PATH": os.environ["PATH"]})
        for tag in ("mine", "mine-too")
    }
    try:
        wait_for(lambda: process_supervisor.tagged("SLIME_TEST_TAG=mine"), 10, "the process shows its tag")
        janitor.sweep()
        assert children["mine"].wait(10) == -signal.SIGTERM
        assert children["mine-too"].poll() is None
    finally:
        children["mine-too"].kill()
        children["mine-too"].wait(10)


@pytest.mark.skipif(small_disk.missing() is not None, reason=str(small_disk.missing()))
def test_a_command_outlives_a_full_log_and_its_last_lines_are_there(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from slime.utils.process_guard import spawn
disk, done = Path(sys.argv[1]), Path(sys.argv[2])
loud = "import sys\\nfor i in range(20000): print('line', i, flush=True)\\nopen(sys.argv[1], 'w').write('done')"
process = spawn([sys.executable, "-c", loud, str(done)], None, disk / "log", "loud")
assert process.wait(60) == 0
assert done.read_text() == "done"
quiet = spawn([sys.executable, "-c", "print('the end'); raise SystemExit(3)"], None, done.with_name("log"), "quiet")
assert quiet.wait(60) == 3
assert quiet.last_lines() == ["the end"], quiet.last_lines()
"""
    found = small_disk.run(tmp_path / "disk", "64k", code, str(tmp_path / "done"))
    assert found.returncode == 0, found.stderr
