"""Run a top-level function on N ranks, each a process of its own, with a deadline.

    results = run_distributed("tests.support.some_module:function", 2, {"path": "/tmp/x"}, timeout=120)

Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment and calls
``function(**kwargs)``. What it returns (anything ``torch.save`` takes) is returned in rank order. When a rank fails, or
the deadline passes, all ranks are killed and the failing ranks' last lines are in the error.

Importing torch and megatron-core costs a rank seven seconds of CPU. So ranks are forked from one process that has
imported them (``tests.support.preloaded``); ``fresh`` ranks, those with an environment of their own and those on a GPU
import everything themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 60
PRELOADED = ["pytest", "tests.support.preloaded"]
# Device -> environment: tests are of the CPU unless they ask for a GPU, on machines with one too.
DEVICES: dict[str, dict[str, str]] = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}, "cuda": {}}


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_distributed(
    target: str,
    world_size: int,
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float = 240.0,
    env: dict[str, str] | None = None,
    device: str = "cpu",
    fresh: bool = False,
) -> list[Any]:
    """Return ``[result of rank 0, result of rank 1, ...]`` of ``module:function``, on CPUs or each on its own GPU.

    ``fresh``: the function has to come before the first import of Megatron, as ``float64.enable`` has.

    Raises RuntimeError with the ranks' last lines when one fails, TimeoutError when ``timeout`` seconds pass. No
    process outlives the call.
    """
    import torch

    port = free_port()
    fresh = fresh or bool(env) or device != "cpu"
    with tempfile.TemporaryDirectory(prefix="slime-ranks-") as folder:
        directory = Path(folder)
        torch.save(kwargs or {}, directory / "kwargs.pt")
        ranks: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                environment = {
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                    **DEVICES[device],
                    **(env or {}),
                }
                (directory / f"log-{rank}.txt").touch()
                ranks.append(_start(target, directory, environment, fresh))
            _wait(ranks, target, timeout, directory)
            return [torch.load(directory / f"result-{rank}.pt", weights_only=False) for rank in range(world_size)]
        finally:
            for process in ranks:
                _kill(process)


def _start(target: str, directory: Path, environment: dict[str, str], fresh: bool) -> BaseProcess:
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_rank, args=(target, directory, environment))
    process.start()
    return process


def _wait(ranks: list[BaseProcess], target: str, timeout: float, directory: Path) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(1.0)  # the others often say why within a moment
            raise RuntimeError(f"{target}: rank(s) {failed} of {len(ranks)} failed\n{_logs(ranks, directory)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise TimeoutError(
                f"{target}: rank(s) {running} of {len(ranks)} still ran after {timeout:.0f} s\n"
                + _logs(ranks, directory)
            )
        time.sleep(0.05)


def _logs(ranks: list[BaseProcess], directory: Path) -> str:
    parts = []
    for rank, process in enumerate(ranks):
        lines = (directory / f"log-{rank}.txt").read_text(errors="replace").splitlines()[-LAST_LINES:]
        parts.append(f"--- rank {rank} (exit status {process.exitcode})\n" + "\n".join(lines))
    return "\n".join(parts)


def _kill(process: BaseProcess) -> None:
    """Kill the rank and what it forked, which are one session once the rank has begun."""
    process.kill()
    assert process.pid, "a rank that was started has a pid"
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.join(timeout=30)


def _rank(target: str, directory: Path, environment: dict[str, str]) -> None:
    """Be a rank: run ``target`` in a new session with ``environment``, and leave its result in ``directory``."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    rank = environment["RANK"]
    with (directory / f"log-{rank}.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    multiprocessing.set_start_method(None, force=True)  # a rank's own children are those of any program
    import torch

    module_name, _, function_name = target.partition(":")
    kwargs = torch.load(directory / "kwargs.pt", weights_only=False)
    try:
        result = getattr(importlib.import_module(module_name), function_name)(**kwargs)
    except Exception:  # noqa: BLE001  a rank's every failure is reported to the parent, as its exit status and log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks may be stuck in a collective: do not wait for them at exit
    torch.save(result, directory / f"partial-{rank}.pt")
    os.replace(directory / f"partial-{rank}.pt", directory / f"result-{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
