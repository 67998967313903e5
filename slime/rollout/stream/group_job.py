"""A group on its way through the fully asynchronous rollout, and the queue of those that finished."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slime.rollout.groups import Group, iter_samples
from slime.utils.types import Sample


@dataclass
class GroupJob:
    """A group that was drawn from the data source and has not been consumed.

    ``original`` is never handed to generation, which gets copies: the group can always be restarted.
    ``step`` is that of the engines' weights at the start, ``oldest`` that of the oldest trained token of ``result``.
    ``failures`` and ``expired`` count how often it raised and was too old.
    """

    original: Group
    number: int = 0
    step: int | None = None
    oldest: int | None = None
    result: Group | None = None
    failures: int = 0
    expired: int = 0
    started: float = field(default_factory=time.monotonic)

    def name(self) -> str:
        """Say which group this is."""
        samples = list(iter_samples(self.original))
        group_index = samples[0].group_index if samples else None
        return f"group {group_index} (samples {[sample.index for sample in samples]})"

    def to_save(self) -> Group:
        """Return what a checkpoint keeps: the result, unless a new start needs the original."""
        flat = self.result is not None and all(isinstance(sample, Sample) for sample in self.result)
        return self.result if flat and self.result is not None else self.original


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
