"""Rewards that misbehave, for the workers that have to bear with them; each is a module-level function."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any


def echo(value: Any) -> Any:
    return value


def describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


def pid() -> int:
    return os.getpid()


def burn(cpu_s: float) -> float:
    """Use ``cpu_s`` seconds of CPU time."""
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        math.factorial(400)
    return 1.0


def burn_answer(*_: Any) -> float:
    """A rule that some answer keeps busy forever."""
    return burn(600.0)


def eat_answer(*_: Any) -> float:
    """A rule that some answer makes take all memory."""
    raise MemoryError


def nap(wall_s: float) -> float:
    time.sleep(wall_s)
    return 1.0


def loop_in_c() -> int:
    """Stay in one C call, which holds the GIL and runs no signal handler of Python's, for minutes."""
    return int(pow(7, 10**9).bit_length())


def raises() -> None:
    raise KeyError("no such answer")


def leaves() -> None:
    sys.exit(3)


def vanishes() -> None:
    os._exit(17)


def breaks() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def eats_memory() -> int:
    hoard = []
    while True:
        hoard.append(bytes(64 << 20))  # of the address space; nothing is written


def forks() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return child


def starts_a_process() -> int:
    return subprocess.run(["sleep", "60"], check=False).returncode


def starts_a_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(5))
    thread.start()
    thread.join()
    return found[0]


def prints(text: str) -> str:
    print(text)
    os.write(1, text.encode())
    sys.stdout.flush()
    return text


def blocks_the_timers() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGPROF})
    time.sleep(60)


def returns_what_cannot_be_pickled() -> Any:
    return lambda: 1


class Hostile:
    """Takes over who unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (66,)


def sends_a_hostile_object() -> Any:
    return Hostile()


def writes_to_the_owner() -> None:
    """Send a pickle in the place of a reply, on the descriptor a reward that has been taken over would find."""
    body = pickle.dumps((False, ("ok", Hostile())))
    for fd in range(3, 16):
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack("<Q", len(body)) + body)
