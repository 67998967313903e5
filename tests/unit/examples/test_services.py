"""Services that start with one command, end with it, and are named when they fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples import services as module
from examples.services import Service, ServiceError, Services, read_services, run_beside
from slime.utils.network import find_available_port

ROOT = Path(__file__).resolve().parents[3]
SERVER = (
    "import sys, http.server as h, threading as t\n"
    "class A(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): (self.send_response(200), self.end_headers())\n"
    "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), A).serve_forever()\n"
)


def service(name: str = "one") -> Service:
    port = find_available_port(21_000)
    return Service(name, ("python", "-c", SERVER, str(port)), f"http://127.0.0.1:{port}/", start_s=60.0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "ANSWER_S", 0.5)


@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "one ended with exit status -9"), (signal.SIGSTOP, "one does not answer at")]
)
def test_a_service_that_fails_is_named_and_ends_the_command(how, words, tmp_path, capsys):
    with Services([service()], tmp_path, grace_s=0.5) as running:
        pid = running.processes["one"].pid
        assert run_beside(running, ["true"]) == 0
        os.kill(pid, how)
        assert run_beside(running, ["sleep", "600"]) == 1
    assert words in str(running.failure)
    assert words in capsys.readouterr().err
    assert not is_alive(pid)


def test_how_long_it_takes_to_name_one_that_hangs():
    """With the values of the module, which the other tests shorten."""
    code = "from examples import services as s; print(s.SILENT_CHECKS * (s.INTERVAL_S + s.ANSWER_S))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) < 30.0


def test_one_that_does_not_start_is_named_with_its_last_words(tmp_path):
    bad = Service("bad", ("python", "-c", "print('no model'); raise SystemExit(3)"), "http://127.0.0.1:9/")
    good = service("good")
    with pytest.raises(ServiceError, match=r"(?s)bad ended with exit status 3.*no model"):
        Services([good, bad], tmp_path).__enter__()
    with pytest.raises(ServiceError, match=r"silent did not answer at http\S+ within 0\.1 s"):
        Services([Service("silent", ("sleep", "60"), "http://127.0.0.1:9/", 0.1)], tmp_path).__enter__()


def test_the_command_starts_services_and_ends_with_a_signal(tmp_path):
    one = service()
    file = tmp_path / "services.yaml"
    entry = f"{{name: one, command: [python, -c, $CODE, '{one.command[3]}'], url: {one.url}}}"
    file.write_text(f"services:\n  - {entry}\n")
    command = [sys.executable, "-m", "examples.services", str(file), "--logs", str(tmp_path)]
    env = {**os.environ, "CODE": SERVER}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one: ready\n"
        process.terminate()
        assert process.wait(30) == 130
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(one.command[3])), 1)
    done = subprocess.run([*command, "--", "false"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1


def test_an_entry_that_is_not_complete(tmp_path):
    file = tmp_path / "services.yaml"
    file.write_text("services:\n  - {name: a, command: [b], port: 3}\n")
    with pytest.raises(ValueError, match=r"services\[0\] lacks \['url'\], and has unknown \['port'\]"):
        read_services(file)
