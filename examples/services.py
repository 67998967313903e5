"""Start the services that a run needs, watch them, and end them with it.

    python -m examples.services examples/tool_orchestra/services.yaml -- examples/tool_orchestra/run.sh

The file has a list ``services``; an entry has a ``name``, a ``command`` (a list of words, in which ``$NAME`` is a
variable of the environment), the ``url`` that answers once the service is ready, and the seconds that this may take,
``start_s`` (600). Without a command after ``--`` the services run until Ctrl-C. When one ends or does not answer any
more, the command is ended, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import requests
import yaml

from slime.utils.process_guard import GuardedProcess, spawn

ROOT = Path(__file__).resolve().parents[1]
INTERVAL_S, ANSWER_S, SILENT_CHECKS = 2.0, 5.0, 3
"""Times that a service is asked, seconds its answer may take, and questions without one after which it is lost: a
service that hangs is named within 21 s, one that ends within 2 s."""


class ServiceError(Exception):
    """A service did not start, ended, or does not answer."""


@dataclass(frozen=True)
class Service:
    """``command`` begins with ``python`` for the interpreter of this process; it is run in the checkout."""

    name: str
    command: tuple[str, ...]
    url: str
    start_s: float = 600.0


class Services:
    """Runs services, each with its output in ``<logs>/<name>.log``, for the time of a ``with`` block.

    At its end each has ``grace_s`` seconds after SIGTERM. Entering waits until all answer; it raises ServiceError, with
    the last lines of the log, when one does not. ``lost`` is set, and ``failure`` says which, when one fails later; it
    is also printed.
    """

    def __init__(self, services: Sequence[Service], logs: Path, grace_s: float = 10.0) -> None:
        self.services, self.logs, self.grace_s = services, logs, grace_s
        self.processes: dict[str, GuardedProcess] = {}
        self.failure: str | None = None
        self.lost = threading.Event()
        self._left = threading.Event()

    def __enter__(self) -> Services:
        try:
            for service in self.services:
                words = [sys.executable if word == "python" else word for word in service.command[:1]]
                log = self.logs / f"{service.name}.log"
                self.processes[service.name] = spawn(
                    [*words, *service.command[1:]], None, log.absolute(), service.name, cwd=str(ROOT)
                )
            for service in self.services:
                self._wait_for(service)
        except BaseException:
            self._stop()
            raise
        for service in self.services:
            threading.Thread(target=self._watch, args=(service,), daemon=True, name=f"watch-{service.name}").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._left.set()
        for process in reversed(self.processes.values()):
            process.stop(self.grace_s)

    def _wait_for(self, service: Service) -> None:
        deadline = time.monotonic() + service.start_s
        while not self._answers(service):
            self._check_alive(service)
            if time.monotonic() > deadline:
                late = f"did not answer at {service.url} within {service.start_s:g} s"
                raise ServiceError(f"{service.name} {late}{self._end_of(service)}")
            time.sleep(0.1)

    def _answers(self, service: Service) -> bool:
        try:
            return requests.get(service.url, timeout=ANSWER_S).ok
        except requests.RequestException:
            return False

    def _check_alive(self, service: Service) -> None:
        code = self.processes[service.name].poll()
        if code is not None:
            raise ServiceError(f"{service.name} ended with exit status {code}{self._end_of(service)}")

    def _end_of(self, service: Service) -> str:
        process = self.processes[service.name]
        return "\n".join(["", f"--- the end of {process.log_path} ---", *process.last_lines(20)])

    def _watch(self, service: Service) -> None:
        silent = 0
        while not self._left.wait(INTERVAL_S):
            silent = 0 if self._answers(service) else silent + 1
            if self._left.is_set():
                return
            try:
                self._check_alive(service)
                if silent == SILENT_CHECKS:
                    raise ServiceError(f"{service.name} does not answer at {service.url}{self._end_of(service)}")
            except ServiceError as error:
                self.failure = str(error)
                print(f"service {error}", file=sys.stderr, flush=True)
                self.lost.set()
                return


def read_services(path: Path) -> list[Service]:
    """Return the services of a file. Raises ValueError for an entry that is not complete or has unknown keys."""
    document: Any = yaml.safe_load(path.read_text())
    found = []
    for number, entry in enumerate(document["services"]):
        missing = {"name", "command", "url"} - set(entry)
        unknown = set(entry) - {"name", "command", "url", "start_s"}
        if missing or unknown:
            raise ValueError(f"{path}: services[{number}] lacks {sorted(missing)}, and has unknown {sorted(unknown)}")
        command = tuple(os.path.expandvars(str(word)) for word in entry["command"])
        found.append(Service(entry["name"], command, os.path.expandvars(entry["url"]), entry.get("start_s", 600.0)))
    return found


def run_beside(services: Services, command: list[str]) -> int:
    """Run ``command``, or wait for a signal where it is empty; return its exit status, 1 when a service was lost."""
    process = subprocess.Popen(command) if command else None
    try:
        while not services.lost.wait(0.2):
            if process is not None and process.poll() is not None:
                return process.returncode
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """Command line; return the exit status."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="YAML with the services")
    parser.add_argument("--logs", type=Path, default=Path("service_logs"), help="directory (default: %(default)s)")
    options = parser.parse_args(words[:cut])

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        with Services(read_services(options.file), options.logs) as services:
            print(f"{', '.join(service.name for service in services.services)}: ready", flush=True)
            return run_beside(services, words[cut + 1 :])
    except (ServiceError, ValueError) as error:
        print(f"service {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
