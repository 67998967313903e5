"""Worker processes for rule rewards: whatever an answer makes a grader do, the event loop goes on.

Each worker is served by a thread of this process and does one job at a time. It has limits on CPU time, wall-clock
time, memory and processes; what exceeds one costs that job, and the worker is replaced. Workers end with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from slime.rollout.rm_hub.failure import RewardFailure
from slime.rollout.rm_hub.frames import job_frame
from slime.rollout.rm_hub.worker_process import STOP_GRACE_S, WALL_PER_CPU, Worker, WorkerEnded, WorkerLimits


def default_worker_count() -> int:
    """Return how many workers to run: 1 up to 4 cores, then one per four cores, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


@dataclass
class _Job:
    function: str
    message: bytes
    answer: Future[Any]


class RewardWorkers:
    """A few worker processes, started at once. Any thread and any event loop may use them."""

    def __init__(self, count: int, limits: WorkerLimits | None = None) -> None:
        self.limits = limits or WorkerLimits()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: list[Worker | None] = [None] * count
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"slime-reward-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers if worker is not None and worker.alive]

    def submit(self, function: str, *arguments: Any) -> Future[Any]:
        """Compute ``function(*arguments)`` in a worker; ``function`` is the dotted path of a module-level function.

        The future raises RewardFailure when the function raises, exceeds a limit or kills its worker.
        """
        answer: Future[Any] = Future()
        try:
            message = job_frame((function, arguments))
        except Exception as e:  # noqa: BLE001  (whatever an argument's own pickling raises)
            answer.set_exception(RewardFailure("raised", f"{function}: the arguments cannot be sent: {e!r}"))
            return answer
        self._jobs.put(_Job(function, message, answer))
        return answer

    async def call(self, function: str, *arguments: Any) -> Any:
        """Await ``submit``. A cancelled call that is being computed is left to end by itself."""
        return await asyncio.wrap_future(self.submit(function, *arguments))

    def close(self) -> None:
        """End the workers; jobs that wait are cancelled."""
        self._closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.answer.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            if worker is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join(STOP_GRACE_S)

    def _run(self, number: int) -> None:
        while True:
            self._prepare(number)
            job = self._jobs.get()
            if job is None:
                break
            if job.answer.set_running_or_notify_cancel():
                try:
                    job.answer.set_result(self._do(number, job))
                except Exception as e:  # noqa: BLE001  (it belongs to whoever waits for the job)
                    job.answer.set_exception(e)
            del job
        self._drop(number)

    def _prepare(self, number: int) -> None:
        """Start a worker where there is none, before its next job comes."""
        if self._workers[number] is None and not self._closed:
            with contextlib.suppress(WorkerEnded, OSError):  # the job meets the same trouble, and reports it
                self._workers[number] = Worker(self.limits)

    def _drop(self, number: int) -> None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.kill()

    def _do(self, number: int, job: _Job) -> Any:
        try:
            worker = self._workers[number]
            if worker is None or not worker.alive:
                self._drop(number)
                worker = self._workers[number] = Worker(self.limits)
            retire, answer = worker.exchange(job.message, self.limits.wall_s + STOP_GRACE_S)
        except WorkerEnded as e:
            self._drop(number)
            raise self._failure(job, e) from None
        except (ValueError, TypeError) as e:  # what a worker sends that a reward has taken over
            self._drop(number)
            raise RewardFailure("crashed", f"{job.function}: its worker sent an unreadable reply: {e}") from None
        if retire:
            self._drop(number)
        if answer[0] == "ok":
            return answer[1]
        kind, message, trace = answer
        raise RewardFailure(kind, f"{job.function}: {message}", trace)

    def _failure(self, job: _Job, end: WorkerEnded) -> RewardFailure:
        """Say what ended the worker."""
        causes: dict[int | None, tuple[str, str]] = {
            None: ("timeout", f"the worker was silent for {self.limits.wall_s + STOP_GRACE_S:g} s and was killed"),
            -signal.SIGPROF: ("timeout", f"took more than {self.limits.cpu_s:g} s of CPU time (--reward-time-limit)"),
            -signal.SIGALRM: (
                "timeout",
                f"took more than {self.limits.wall_s:g} s ({WALL_PER_CPU:g} x --reward-time-limit)",
            ),
        }
        kind, said = causes.get(end.code, ("crashed", f"ended its worker process with exit code {end.code}"))
        return RewardFailure(kind, f"{job.function}: {said}", end.last_words)


_pools: dict[tuple[Any, ...], RewardWorkers] = {}
_lock = threading.Lock()


def get_reward_workers(args: Any) -> RewardWorkers:
    """Return this process's workers for ``args.reward_workers`` and ``args.reward_time_limit``, starting them once."""
    count = args.reward_workers or default_worker_count()
    key = (os.getpid(), count, args.reward_time_limit)
    with _lock:
        if key not in _pools:
            _pools[key] = RewardWorkers(count, WorkerLimits(args.reward_time_limit))
        return _pools[key]


@atexit.register
def close_reward_workers() -> None:
    """End the workers that ``get_reward_workers`` has started in this process; it starts new ones when asked again."""
    with _lock:
        pools = [_pools.pop(key) for key in list(_pools) if key[0] == os.getpid()]
    for pool in pools:
        pool.close()
