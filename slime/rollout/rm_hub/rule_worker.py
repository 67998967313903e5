"""Worker processes for rewards that may take long: whatever an answer makes sympy do, the event loop goes on.

Rewards that only compare text run where they are called: they take microseconds and cannot hang. Only a question that
needs sympy is sent to a worker, as JSON over pipes. A worker that exceeds the wall-clock limit dies of its own alarm,
whatever code it is in, and is replaced. Workers start on first use and end with the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

from slime.rollout.rm_hub.errors import RewardTimeout

LIMIT_S = 5.0
START_LIMIT_S = 120.0
MEMORY_LIMIT_BYTES = 4 << 30


def worker_count() -> int:
    """Return how many workers to run: 1 up to 4 cores, then one per four cores, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


class RuleWorkers:
    """A few worker processes, each serving one question at a time, bound to one event loop."""

    def __init__(self, count: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(count):
            self._idle.put_nowait(None)

    async def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer of ``_QUESTIONS[question](*arguments)``, computed in a worker.

        Raises RewardTimeout when it takes longer than the limit or kills the worker, RuntimeError when it raises.
        """
        worker = await self._idle.get()
        try:
            if worker is None or worker.returncode is not None:
                worker = await self._start()
            answer = await self._exchange(worker, {"question": question, "arguments": arguments})
        except BaseException:
            if worker is not None and worker.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
            worker = None
            raise
        finally:
            self._idle.put_nowait(worker)
        if "error" in answer:
            raise RuntimeError(f"{question}{arguments!r} failed in the reward worker: {answer['error']}")
        return answer["result"]

    async def _start(self) -> asyncio.subprocess.Process:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "slime.rollout.rm_hub.rule_worker", str(self.limit_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        await self._read(worker, START_LIMIT_S, "start")
        return worker

    async def _exchange(self, worker: asyncio.subprocess.Process, message: dict[str, Any]) -> dict[str, Any]:
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(message).encode() + b"\n")
        return await self._read(worker, self.limit_s + 5.0, repr(message["arguments"])[:300])

    async def _read(self, worker: asyncio.subprocess.Process, deadline_s: float, what: str) -> dict[str, Any]:
        assert worker.stdout is not None
        try:
            line = await asyncio.wait_for(worker.stdout.readline(), deadline_s)
        except TimeoutError as e:
            raise RewardTimeout(f"the reward worker did not answer within {deadline_s:g} s: {what}") from e
        if not line:
            code = await worker.wait()
            cause = f"took more than {self.limit_s:g} s" if code == -signal.SIGALRM else f"ended with exit code {code}"
            raise RewardTimeout(f"the reward worker {cause}: {what}")
        return dict(json.loads(line))

    async def close(self) -> None:
        """End the workers."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            if worker is not None and worker.returncode is None:
                worker.kill()
                await worker.wait()
            self._idle.put_nowait(None)


_workers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, RuleWorkers] = weakref.WeakKeyDictionary()


def get_rule_workers() -> RuleWorkers:
    """Return the running loop's workers."""
    loop = asyncio.get_running_loop()
    if loop not in _workers:
        _workers[loop] = RuleWorkers(worker_count(), LIMIT_S)
    return _workers[loop]


def _equal_values(given: str, truth: str) -> bool:
    from slime.rollout.rm_hub.math_utils import grade_answer_sympy

    return grade_answer_sympy(given, truth)


_QUESTIONS: dict[str, Callable[..., Any]] = {"equal_values": _equal_values}


def _serve(limit_s: float) -> None:
    import ctypes
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    import sympy  # noqa: F401  (the first question should not pay for it)

    out = sys.stdout
    sys.stdout = sys.stderr
    print(json.dumps({"result": "ready"}), file=out, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            answer = {"result": _QUESTIONS[message["question"]](*message["arguments"])}
        except Exception as e:  # noqa: BLE001  (reported to the owner, who raises it)
            answer = {"error": f"{type(e).__name__}: {e}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
