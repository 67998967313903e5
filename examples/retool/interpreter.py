"""Run the Python code that a model wrote, each piece in a process of its own.

The processes are made by workers like those of rule rewards: CPU time, wall-clock time and memory are limited, and a
filter of system calls leaves nothing but computing, so that there is no environment, no file, no network and no other
process, whatever objects the code gets hold of. What it changes is gone with its process. On top of that the code
imports only ``MODULES``, which are loaded before.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import sys
import threading
from typing import Any

from slime.rollout.rm_hub.failure import JobEnded, RewardFailure
from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits, default_worker_count

MODULES = (
    "math", "random", "datetime", "collections", "itertools", "functools", "operator", "statistics", "decimal",
    "fractions",
)  # fmt: skip
LONGEST_OUTPUT = 10_000
LONGEST_ERROR = 500
"""Characters, both."""
_LOADED_LATER = (
    "_strptime", "collections.abc", "encodings.ascii", "encodings.latin_1", "encodings.utf_16", "encodings.utf_32",
    "encodings.cp1252", "encodings.hex_codec", "encodings.unicode_escape", "unicodedata",
)  # fmt: skip
"""Modules that the others and methods of texts load when they are used."""
for _name in (*MODULES, *_LOADED_LATER):
    importlib.import_module(_name)
_FORBIDDEN = ("open", "input", "exec", "eval", "compile", "breakpoint", "exit", "quit", "help", "globals", "vars")


class _Output(io.StringIO):
    """Keeps the first ``LONGEST_OUTPUT`` characters, and stops code that prints more."""

    def write(self, text: str) -> int:
        room = LONGEST_OUTPUT - self.tell()
        super().write(text[:room])
        if len(text) > room:
            raise OverflowError(f"more than {LONGEST_OUTPUT} characters of output")
        return len(text)


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    if name.partition(".")[0] not in MODULES and name not in _LOADED_LATER:
        raise ImportError(f"{name!r} is not available; the modules are {', '.join(MODULES)}")
    return builtins.__import__(name, *args, **kwargs)


def run_code(code: str) -> tuple[str, bool]:
    """Return what ``code`` prints and the value of a last expression, and False; or the error at the end, and True.

    Called in a worker.
    """
    output, allowed = _Output(), {n: v for n, v in vars(builtins).items() if n not in _FORBIDDEN}
    names = {"__name__": "__main__", "__builtins__": {**allowed, "__import__": _import}}
    stdout, sys.stdout = sys.stdout, output
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
            if value is not None:
                print(value)
    except BaseException as e:  # noqa: BLE001  (whatever the code does is an answer, SystemExit and MemoryError too)
        return f"{output.getvalue()}{type(e).__name__}: {str(e)[:LONGEST_ERROR]}", True
    finally:
        sys.stdout = stdout
    return output.getvalue().rstrip("\n"), False


_pools: dict[tuple[float, int], RewardWorkers] = {}
_lock = threading.Lock()


def _workers(cpu_s: float, memory_bytes: int) -> RewardWorkers:
    with _lock:
        if (cpu_s, memory_bytes) not in _pools:
            limits = WorkerLimits(cpu_s, memory_bytes, fresh=True, sealed=True)
            _pools[cpu_s, memory_bytes] = RewardWorkers(default_worker_count(), limits)
        return _pools[cpu_s, memory_bytes]


def close_workers() -> None:
    """End the workers of this process, which end with it anyway; the next call starts new ones."""
    with _lock:
        while _pools:
            _pools.popitem()[1].close()


async def interpret(code: str, *, cpu_s: float = 20.0, memory_bytes: int = 4 << 30) -> tuple[str, bool]:
    """Return what the model is to see of ``code``, and whether that is an error.

    ``cpu_s`` are seconds of CPU time; six times as many may pass by the clock. Code that takes more is an error like
    any other. Raises RewardFailure when a worker crashed.
    """
    try:
        text, failed = await _workers(cpu_s, memory_bytes).call(f"{__name__}.run_code", code)
    except RewardFailure as e:
        if e.kind == "crashed" and isinstance(e, JobEnded):
            return "SystemExit: the code ended the interpreter", True
        if e.kind not in ("timeout", "memory"):
            raise
        limit = f"{cpu_s:g} s of computing" if e.kind == "timeout" else f"{memory_bytes / 2**30:g} GiB of memory"
        return f"{e.kind}: the code took more than {limit}", True
    return str(text), bool(failed)
