"""Worker processes for rule rewards: no answer makes a grader block the event loop.

Each worker is served by a thread of this process and does one job at a time. It has limits on CPU time, wall-clock
time, memory and processes; what exceeds one costs that job, and the worker is replaced. Workers end with this process.

Jobs and replies travel as a length and a body. Jobs are pickles, because labels may be anything a data set holds (numpy
values, decimals, dates), and their sender is trusted. Replies are JSON: a worker has parsed what a model wrote, and
nothing it sends may be executed. (``pebble.ProcessPool`` unpickles what workers send, and its workers share one pipe,
which one of them can corrupt for all.)
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from slime.arguments.args import Args
from slime.rollout.rm_hub.failure import JobEnded, RewardFailure
from slime.utils.cores import usable_cores

START_LIMIT_S = 120.0
STOP_GRACE_S = 5.0
"""Time after its own limit at which a worker that has not ended is killed."""
WALL_PER_CPU = 6.0
STDERR_BYTES = 8192
"""Of the end of standard error, kept for the message."""
LENGTH = struct.Struct("<Q")
ENVIRONMENT = (
    "PATH", "HOME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NLTK_DATA",
)  # fmt: skip
"""The variables that a worker gets, with ``LC_*`` and ``PYTHON*``: no keys, no addresses of services."""


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith(("LC_", "PYTHON"))}


def job_frame(value: object) -> bytes:
    """Return ``value`` as ``read_job`` reads it."""
    body = pickle.dumps(value, protocol=5)
    return LENGTH.pack(len(body)) + body


def read_job(stream: BinaryIO) -> Any:
    """Return the next job of ``stream``. Raises EOFError at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


def reply_frame(value: object) -> bytes:
    """Return ``value`` in a frame of JSON, tuples as lists. Raises TypeError or ValueError for what is no JSON."""
    body = json.dumps(value).encode()
    return LENGTH.pack(len(body)) + body


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of one job. The wall-clock limit is wider: a busy machine must not change rewards.

    ``fresh``: every job has a new process, so that nothing it does remains for the next one. ``sealed``: that
    process has no environment, no files, no network and no other process; only what was loaded before is available.
    """

    cpu_s: float = 5.0
    memory_bytes: int = 4 << 30
    fresh: bool = False
    sealed: bool = False

    @property
    def wall_s(self) -> float:
        return WALL_PER_CPU * self.cpu_s


class WorkerEnded(Exception):
    """The worker has ended, with this exit code (None: it was killed because it did not answer)."""

    def __init__(self, code: int | None, stderr: str) -> None:
        self.code = code
        self.stderr = stderr


class Worker:
    """The owner's side of one worker process."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        python_path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        words = [str(os.getpid()), json.dumps(asdict(limits))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rm_hub.worker_main", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**_environment(), "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        self._stdin, self._stdout, self._stderr = (
            pipe.fileno() for pipe in (self.process.stdin, self.process.stdout, self.process.stderr) if pipe
        )
        self._received, self._stderr_tail = bytearray(), b""
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        try:
            self.exchange(job_frame([root, *sys.path]), START_LIMIT_S)
        except BaseException:  # KeyboardInterrupt too: no one else would end the process
            self.kill()
            raise

    def exchange(self, message: bytes, limit_s: float) -> Any:
        """Send a framed message and return the reply. Raises WorkerEnded when none comes within ``limit_s``."""
        deadline = time.monotonic() + limit_s
        self._stderr_tail = b""
        self._send(message, deadline)
        head = self._receive(LENGTH.size, deadline)
        return json.loads(self._receive(LENGTH.unpack(head)[0], deadline))

    def _send(self, message: bytes, deadline: float) -> None:
        view = memoryview(message)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _receive(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            self._wait(self._stdout, select.POLLIN, deadline)
            data = os.read(self._stdout, 1 << 20)
            if not data:
                raise self._ended()
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        """Wait until ``fd`` is ready, reading what the worker writes to standard error."""
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._stderr, select.POLLIN)
        while True:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000.0))
            if not ready:
                self.kill()
                raise WorkerEnded(None, self._stderr_text())
            if self._stderr in ready and not self._read_stderr():
                poll.unregister(self._stderr)
            if fd in ready:
                return

    def _read_stderr(self) -> bool:
        """Read standard error; False at its end."""
        try:
            data = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return True
        self._stderr_tail = (self._stderr_tail + data)[-STDERR_BYTES:]
        return bool(data)

    def _stderr_text(self) -> str:
        return self._stderr_tail.decode(errors="replace").strip()

    def last_words(self) -> str:
        """Return the end of what it has written to standard error."""
        while select.select([self._stderr], [], [], 0)[0] and self._read_stderr():
            pass
        return self._stderr_text()

    def _ended(self) -> WorkerEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        words = self.last_words()
        self.kill()
        return WorkerEnded(self.process.returncode, words)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the worker, and what it may have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def default_worker_count() -> int:
    """Return how many workers to run: 1 up to 4 cores, then one per four cores, at most 8."""
    return max(1, min(8, usable_cores() // 4))


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

    def submit(self, function: str, *arguments: object) -> Future[Any]:
        """Compute ``function(*arguments)`` in a worker; ``function`` is the dotted path of a module-level function.

        The future raises RewardFailure when the function raises, exceeds a limit or kills its worker.
        """
        answer: Future[Any] = Future()
        try:
            message = job_frame((function, arguments))
        except Exception as e:  # noqa: BLE001  (anything that an argument's own pickling raises)
            answer.set_exception(RewardFailure("raised", f"{function}: the arguments cannot be sent: {e!r}"))
            return answer
        self._jobs.put(_Job(function, message, answer))
        return answer

    async def call(self, function: str, *arguments: object) -> Any:
        """Await ``submit``. A cancelled call that is being computed is left to end."""
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
            # start a worker where there is none, before its next job comes
            if self._workers[number] is None and not self._closed:
                with contextlib.suppress(WorkerEnded, OSError):  # the job fails in the same way, and reports it
                    self._workers[number] = Worker(self.limits)
            job = self._jobs.get()
            if job is None:
                break
            if job.answer.set_running_or_notify_cancel():
                try:
                    job.answer.set_result(self._do(number, job))
                except Exception as e:  # noqa: BLE001  (raised where the job is awaited)
                    job.answer.set_exception(e)
            del job
        self._drop(number)

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
        if answer[0] == "ended":
            failure = self._failure(job, WorkerEnded(answer[1], worker.last_words()))
            raise JobEnded(failure.kind, str(failure), failure.details)
        kind, message, trace = answer
        raise RewardFailure(kind, f"{job.function}: {message}", trace, by_answer=kind == "memory")

    def _failure(self, job: _Job, end: WorkerEnded) -> RewardFailure:
        """Return the failure of a job whose worker has ended."""
        cpu_s, wall_s = self.limits.cpu_s, self.limits.wall_s
        causes: dict[int | None, tuple[str, str]] = {
            None: ("timeout", f"the worker did not answer within {wall_s + STOP_GRACE_S:g} s and was killed"),
            -signal.SIGPROF: ("timeout", f"took more than {cpu_s:g} s of CPU time (--reward-time-limit)"),
            -signal.SIGALRM: ("timeout", f"took more than {wall_s:g} s ({WALL_PER_CPU:g} x --reward-time-limit)"),
        }
        kind, said = causes.get(end.code, ("crashed", f"ended its worker process with exit code {end.code}"))
        return RewardFailure(kind, f"{job.function}: {said}", end.stderr, by_answer=end.code == -signal.SIGPROF)


_pools: dict[tuple[Any, ...], RewardWorkers] = {}
_lock = threading.Lock()


def get_reward_workers(args: Args, *, fresh: bool = False) -> RewardWorkers:
    """Return this process's workers for ``args.reward_workers`` and ``args.reward_time_limit``, starting them once."""
    count = args.reward_workers or default_worker_count()
    key = (os.getpid(), count, args.reward_time_limit, fresh)
    with _lock:
        if key not in _pools:
            _pools[key] = RewardWorkers(count, WorkerLimits(args.reward_time_limit, fresh=fresh))
        return _pools[key]


@atexit.register
def close_reward_workers() -> None:
    """End the workers that ``get_reward_workers`` has started in this process; it starts new ones when asked again."""
    with _lock:
        pools = [_pools.pop(key) for key in list(_pools) if key[0] == os.getpid()]
    for pool in pools:
        pool.close()
