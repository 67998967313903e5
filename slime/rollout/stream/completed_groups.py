"""The queue between generation and training of the fully asynchronous rollout."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slime.rollout.stream.group_job import GroupJob


class CompletedGroups:
    """Finished groups, oldest first: by the weights that made them, and among equals by when they finished.

    Thread-safe, and no method waits for anything but another one.
    """

    def __init__(self) -> None:
        self._jobs: list[GroupJob] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: GroupJob) -> None:
        """Append a finished job."""
        with self._lock:
            self._jobs.append(job)

    def take(self, limit: int | None = None, where: Callable[[GroupJob], bool] | None = None) -> list[GroupJob]:
        """Remove and return the oldest jobs, at most ``limit``; with ``where`` of those that it holds for."""
        with self._lock:
            found = [job for job in self._jobs if where is None or where(job)]
            found.sort(key=lambda job: -1 if job.oldest is None else job.oldest)
            taken = found if limit is None else found[: max(0, limit)]
            chosen = {id(job) for job in taken}
            self._jobs = [job for job in self._jobs if id(job) not in chosen]
            return taken

    def peek(self) -> list[GroupJob]:
        """Return the jobs, which stay."""
        with self._lock:
            return list(self._jobs)
