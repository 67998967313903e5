"""Named wall-clock timers of one process, reported as ``perf/<name>_time``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Watcher(Protocol):
    """Called in the timed thread when a timer of ``measure`` begins and ends."""

    def began(self, name: str) -> None: ...
    def ended(self, name: str) -> None: ...


class Timers:
    """Adds up seconds by name. Thread-safe; a name may be timed again, also nested, and its times add up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._watchers: dict[str, Watcher] = {}

    def watch(self, kind: str, watcher: Watcher) -> None:
        """Tell ``watcher`` of every phase that ``measure`` times, instead of an earlier one of its ``kind``."""
        self._watchers[kind] = watcher

    def start(self, name: str) -> None:
        """Start ``name``; raises RuntimeError when it runs already."""
        with self._lock:
            if name in self._started:
                raise RuntimeError(f"timer {name!r} was started twice without a stop in between")
            self._started[name] = time.monotonic()

    def stop(self, name: str) -> float:
        """Stop ``name`` and return the seconds since its start; raises RuntimeError when it does not run."""
        with self._lock:
            if name not in self._started:
                raise RuntimeError(f"timer {name!r} was stopped without a start")
            elapsed = time.monotonic() - self._started.pop(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
            return elapsed

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises."""
        watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.began(name)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begin)
            for watcher in reversed(watchers):
                watcher.ended(name)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name since the last :meth:`drain`."""
        with self._lock:
            return dict(self._seconds)

    def reset(self, name: str | None = None) -> None:
        """Forget the seconds of ``name``, or all."""
        with self._lock:
            for one in [name] if name is not None else list(self._seconds):
                self._seconds.pop(one, None)

    def drain(self, prefix: str = "perf/") -> dict[str, float]:
        """Return ``{<prefix><name>_time: seconds}`` and set all sums to zero; running timers continue."""
        with self._lock:
            metrics = {f"{prefix}{name}_time": value for name, value in self._seconds.items()}
            self._seconds.clear()
            return metrics


_timers = Timers()


def get_timers() -> Timers:
    """Return the timers of this process."""
    return _timers


def timer(name: str | Callable[..., Any]) -> Any:
    """Time a block, or a function when used as a decorator, under ``name``; a bare ``@timer`` takes the function's."""
    if callable(name):
        return _timers.measure(name.__name__)(name)
    return _timers.measure(name)


def drain_metrics(prefix: str = "perf/") -> dict[str, float]:
    """Return and reset this process's timers as metrics, e.g. ``{"perf/log_probs_time": 1.3}``."""
    return _timers.drain(prefix)


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop ``name``, which runs, for the length of a block."""
    _timers.stop(name)
    try:
        yield
    finally:
        _timers.start(name)


class Timer:
    """The timers of this process, by the names of slime <= 0.3.1; every ``Timer()`` is of the same ones."""

    def start(self, name: str) -> None:
        """Start ``name``."""
        _timers.start(name)

    def end(self, name: str) -> None:
        """Stop ``name``."""
        _timers.stop(name)

    def add(self, name: str, elapsed_time: float) -> None:
        """Add seconds measured elsewhere."""
        _timers.add(name, elapsed_time)

    def reset(self, name: str | None = None) -> None:
        """Forget the seconds of ``name``, or all."""
        _timers.reset(name)

    def context(self, name: str) -> AbstractContextManager[None]:
        """Time a block."""
        return _timers.measure(name)

    def log_dict(self) -> dict[str, float]:
        """Return the seconds by name."""
        return _timers.seconds()
