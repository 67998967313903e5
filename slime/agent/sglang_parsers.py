"""SGLang's parsers of reasoning and tool calls, in this process or, where SGLang cannot be imported, in a helper.

SGLang imports triton before it knows the device. On a machine without triton the parsers run in a process that has the
stand-ins of CPU engines on its path, as no other process may.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from slime.arguments.passthrough.catalog import STAND_INS, records_or_reason
from slime.arguments.passthrough.source import SGLANG
from slime.utils.secrets import public_environment

START_DEADLINE_S = 300.0
PARSE_DEADLINE_S = 30.0

_lock = threading.Lock()
_helper: _Helper | None = None


class UnparsableOutput(Exception):
    """A parser failed on what the model wrote."""


def split_reasoning(raw: str, parser_name: str) -> tuple[str, str]:
    """Return (reasoning, rest) by SGLang's reasoning parser. Raises ValueError for a name it lacks."""
    reasoning, rest = _call("reasoning", raw, parser_name)
    return reasoning, rest


def tool_calls(body: str, tools: list[Any], parser_name: str) -> tuple[str, list[tuple[str, str]], bool]:
    """Return the text without calls, the calls as (name, arguments in JSON), and whether one seemed to begin.

    Raises ValueError for a parser name that SGLang lacks, UnparsableOutput when the parser fails.
    """
    text, calls, began = _call("tools", body, tools, parser_name)
    return text, [(name, arguments) for name, arguments in calls], began


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ValueError for a parser that the installed SGLang does not have, without importing it."""
    found = records_or_reason(SGLANG)
    if isinstance(found, str):  # the installed SGLang cannot be read here
        return
    choices = {record["dest"]: record["choices"] or () for record in found}
    for kind, dest, name in [
        ("tool-call", "tool_call_parser", tool_parser),
        ("reasoning", "reasoning_parser", reasoning_parser),
    ]:
        if name == "auto":
            raise ValueError(f"the {kind} parser must be named: 'auto' is found out by engines only")
        if name is not None and name.lower() not in choices[dest]:
            raise _unknown(kind, name, choices[dest])


def _unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"SGLang has no {kind} parser {name!r}; it has {', '.join(sorted(set(known) - {'auto'}))}")


@cache
def importable() -> bool:
    """Return True if SGLang can be imported in this process."""
    return importlib.util.find_spec("triton") is not None


def _call(function: str, *arguments: object) -> Any:
    return FUNCTIONS[function](*arguments) if importable() else call_helper(function, *arguments)


def _reasoning(raw: str, parser_name: str) -> tuple[str, str]:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    known = ReasoningParser.DetectorMap
    if parser_name.lower() not in known:
        raise _unknown("reasoning", parser_name, known)
    try:
        reasoning, rest = ReasoningParser(parser_name, stream_reasoning=False).parse_non_stream(raw)
    except Exception:  # noqa: BLE001  (anything that a parser fails on was written by the model)
        return "", raw
    return reasoning or "", rest or ""


def _tools(body: str, tools: list[Any], parser_name: str) -> tuple[str, list[tuple[str, str]], bool]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    known = FunctionCallParser.ToolCallParserEnum
    if parser_name not in known:
        raise _unknown("tool-call", parser_name, known)
    parser = FunctionCallParser([Tool(**tool) for tool in tools], parser_name)
    try:
        text, calls = parser.parse_non_stream(body)
        began = parser.has_tool_call(body)
    except Exception as e:  # likewise
        raise UnparsableOutput(f"{type(e).__name__}: {e}") from e
    return text or "", [(call.name or "", call.parameters) for call in calls], began


FUNCTIONS: dict[str, Callable[..., Any]] = {"reasoning": _reasoning, "tools": _tools}


# The helper process


class ParserHangs(UnparsableOutput):
    """A parser took too long."""


class _Helper:
    """The process that imports SGLang, and the pipe to it: one per process, started at the first use."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.connection, theirs = Pipe()
        here = str(Path(__file__).parents[2])
        paths = [str(STAND_INS), here, os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(p for p in paths if p)
        environment = {**public_environment(), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slime.agent.sglang_parsers", str(theirs.fileno())],
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


def call_helper(function: str, *arguments: object) -> Any:
    """Run one of ``FUNCTIONS`` in the helper. Thread-safe; a helper that hangs or ends is replaced.

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
            if type(e) not in (ValueError, UnparsableOutput):  # it hangs or has ended, or the caller was interrupted
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
    """Answer calls until the owner has ended."""
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
