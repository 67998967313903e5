"""Child processes end when they are asked to, and are killed when they do not."""

from __future__ import annotations

import multiprocessing
import signal
import time

from slime.servers.http_utils import terminate_process


def sleep(ready, stubborn):
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def start(stubborn):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=sleep, args=(ready, stubborn), daemon=True)
    process.start()
    assert ready.wait(30)
    return process


def test_children_are_asked_and_then_killed():
    polite, stubborn = start(False), start(True)
    terminate_process(polite, timeout=30)
    assert polite.exitcode == -signal.SIGTERM
    terminate_process(stubborn, timeout=0.2)
    assert stubborn.exitcode == -signal.SIGKILL
    terminate_process(stubborn)  # one that has ended is left alone
