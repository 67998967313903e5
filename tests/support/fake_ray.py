"""A stand-in for ``ray`` in tests of what waits for remote calls: references resolve on a clock that is set by hand.

Exceptions are Ray's own, wrapped as Ray wraps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ray.exceptions

_numbers = itertools.count()


class Ref:
    """A reference that resolves ``at`` seconds: to ``value``, or to an exception that a remote method has raised."""

    def __init__(self, value: Any = None, *, at: float = 0.0) -> None:
        self.value, self.at, self.number = value, at, next(_numbers)

    def __repr__(self) -> str:
        return f"Ref({self.number} at {self.at})"


NEVER = float("inf")


class FakeRay:
    """``wait``, ``get`` and ``exceptions`` of ray, and ``monotonic`` of time, over ``Ref``s. ``now`` is in seconds."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def monotonic(self) -> float:
        return self.now

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float, fetch_local: bool = True
    ) -> tuple[list[Ref], list[Ref]]:
        self.waits += 1
        assert self.waits < 5000, "waiting without end"
        assert len(set(refs)) == len(refs), "ray.wait refuses duplicates"
        assert 0 < num_returns <= len(refs), "ray.wait refuses this"
        moments = sorted(ref.at for ref in refs)
        self.now = min(max(self.now, moments[num_returns - 1]), self.now + timeout)
        ready = [ref for ref in sorted(refs, key=lambda ref: ref.at) if ref.at <= self.now][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        assert ref.at <= self.now, "this get would block"
        value = ref.value
        if isinstance(value, ray.exceptions.RayError):
            raise value
        if isinstance(value, BaseException):
            raise remote(value)
        return value


def remote(cause: BaseException) -> Exception:
    """Return what ``ray.get`` raises when a remote method has raised ``cause``."""
    error = ray.exceptions.RayTaskError("method", f"remote traceback of {cause!r}", cause)
    raised: Exception = error.as_instanceof_cause()
    return raised
