"""The helper process that imports SGLang for its parsers where this process cannot.

One per process, started at the first use (which takes the seconds that SGLang takes to import), ended with its owner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from slime.agent.sglang_parsers import FUNCTIONS, UnparsableOutput
from slime.arguments.passthrough.reading import STAND_INS

START_DEADLINE_S = 300.0
PARSE_DEADLINE_S = 30.0

_lock = threading.Lock()
_helper: _Helper | None = None


class ParserHangs(UnparsableOutput):
    """A parser did not come to an end."""


class _Helper:
    """The process and the pipe to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        here = str(Path(__file__).parents[2])
        paths = [str(STAND_INS), here, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slime.agent.parser_process", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.answered = False

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        deadline = PARSE_DEADLINE_S if self.answered else START_DEADLINE_S
        try:
            self.connection.send_bytes(json.dumps([function, arguments]).encode())
            if not self.connection.poll(deadline):
                raise ParserHangs(f"the parser has not answered within {deadline:g} s")
            kind, value = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as e:
            self.process.kill()
            raise RuntimeError(
                f"the process of SGLang's parsers ended (exit status {self.process.wait()}); its reason is in the log "
                "above. Parsers by name need the package sglang."
            ) from e
        self.answered = True
        if kind == "result":
            return value
        raise {"ValueError": ValueError, "UnparsableOutput": UnparsableOutput}.get(kind, RuntimeError)(value)

    def end(self) -> None:
        self.connection.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


def call(function: str, *arguments: Any) -> Any:
    """Run one of ``sglang_parsers.FUNCTIONS`` in the helper. Thread-safe; a helper that hangs or dies is replaced.

    Raises what the function raises, UnparsableOutput when it takes longer than 30 s, and RuntimeError when the helper
    cannot run at all.
    """
    global _helper
    with _lock:
        if _helper is not None and _helper.owner != os.getpid():
            _helper = None  # a forked process needs one of its own
        if _helper is None:
            _helper = _Helper()
        try:
            return _helper.call(function, arguments)
        except BaseException as e:
            if type(e) not in (ValueError, UnparsableOutput):  # it hangs, has ended, or its answer was not waited for
                _close()
            raise


def close() -> None:
    """End the helper, if there is one."""
    with _lock:
        _close()


def _close() -> None:
    global _helper
    if _helper is not None:
        _helper.end()
        _helper = None


def serve(connection: Connection) -> None:
    """Answer calls until the owner is gone."""
    while True:
        try:
            function, arguments = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = ("result", FUNCTIONS[function](*arguments))
        except Exception as e:  # noqa: BLE001  (raised again by the owner)
            kind = type(e).__name__
            answer = (kind, str(e) if kind in ("ValueError", "UnparsableOutput") else f"{kind}: {e}")
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
