"""The process that computes rewards for another one: a loop of one job at a time, under limits.

Run as ``python -m slime.rollout.rm_hub.worker_main`` by ``slime.rollout.rm_hub.workers``. Jobs come on standard input
and replies go to standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import traceback
from typing import Any, BinaryIO

from slime.rollout.rm_hub.frames import read_job, reply_frame
from slime.rollout.rm_hub.worker_limits import die_with_owner, forbid_processes, limit_memory

NICENESS = 5
"""The event loop that waits for rewards goes first."""
RETIRE_BYTES = 1 << 30
"""A worker that has once held this much is replaced: Python seldom gives memory back."""


def _own_channel() -> tuple[BinaryIO, BinaryIO]:
    """Return the two ends to the owner, out of the reach of rewards that print or read."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return jobs, replies


def _die_of_timers() -> None:
    """Let both timers end this process in whatever code it is, after the stack is written to standard error."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        faulthandler.register(number, all_threads=False, chain=True)


def _set_timers(cpu_s: float, wall_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def _answer(function: str, arguments: tuple[Any, ...], cpu_s: float, wall_s: float) -> tuple[Any, ...]:
    """Return ``("ok", result)``, or ``("memory" or "raised", message, traceback)``."""
    from slime.rollout.rm_hub import rules
    from slime.utils.misc import load_function

    try:
        if function == rules.PATH:
            rules.prepare(*arguments)
        _set_timers(cpu_s, wall_s)
        return ("ok", load_function(function)(*arguments))
    except MemoryError as e:
        return ("memory", f"MemoryError: {e}", "".join(traceback.format_exception(e, limit=-20)))
    except BaseException as e:  # noqa: BLE001  (SystemExit too: the worker is there for the next sample)
        return ("raised", f"{type(e).__name__}: {e}", "".join(traceback.format_exception(e, limit=-20)))
    finally:
        _set_timers(0, 0)


def _reply(answer: tuple[Any, ...]) -> bytes:
    retire = answer[0] == "memory" or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > RETIRE_BYTES
    try:
        return reply_frame((retire, answer))
    except (TypeError, ValueError) as e:
        return reply_frame((retire, ("raised", f"the result cannot be sent back: {type(e).__name__}: {e}", "")))


def serve(owner_pid: int, cpu_s: float, wall_s: float, memory_bytes: int) -> None:
    """Answer jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's business
    die_with_owner(owner_pid)
    jobs, replies = _own_channel()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    faulthandler.enable()
    _die_of_timers()
    limit_memory(memory_bytes)
    forbid_processes()
    sys.path[:] = read_job(jobs)
    import sympy  # noqa: F401  (the first job should not pay for it)

    _write_all(replies, reply_frame("ready"))
    while True:
        try:
            function, arguments = read_job(jobs)
        except EOFError:
            return
        except Exception as e:  # noqa: BLE001  (an argument whose class cannot be imported here)
            answer: tuple[Any, ...] = ("raised", f"unreadable arguments: {type(e).__name__}: {e}", "")
        else:
            answer = _answer(function, arguments, cpu_s, wall_s)
        _write_all(replies, _reply(answer))


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
