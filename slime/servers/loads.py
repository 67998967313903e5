"""The number of requests that an engine holds, and of those that wait, from its reply to ``GET /v1/loads``."""

from __future__ import annotations

from typing import Any

_TOTALS = ("num_reqs", "num_total_reqs", "total_reqs")
_RUNNING = ("num_running_reqs", "total_running_reqs")
_WAITING = ("num_waiting_reqs", "total_waiting_reqs")


def num_requests_from_load(load: object) -> int:
    """Return running plus waiting requests of a load reply.

    A list (one entry per data-parallel rank) is summed; ``{"loads": ...}`` is opened; otherwise the first integer of
    ``num_reqs``, ``num_total_reqs``, ``total_reqs`` counts, and failing that running plus waiting.
    """
    if isinstance(load, list):
        return sum(num_requests_from_load(entry) for entry in load)
    if not isinstance(load, dict):
        raise ValueError(f"A load reply is a list or an object, got {type(load).__name__}: {load!r}")
    if "loads" in load:
        return num_requests_from_load(load["loads"])
    total = _first_int(load, _TOTALS)
    if total is not None:
        return total
    return (_first_int(load, _RUNNING) or 0) + (_first_int(load, _WAITING) or 0)


def num_waiting_from_load(load: object) -> int:
    """Return how many requests of a load reply are waiting; 0 where it has no such field."""
    if isinstance(load, list):
        return sum(num_waiting_from_load(entry) for entry in load)
    if not isinstance(load, dict):
        raise ValueError(f"A load reply is a list or an object, got {type(load).__name__}: {load!r}")
    return num_waiting_from_load(load["loads"]) if "loads" in load else _first_int(load, _WAITING) or 0


def _first_int(load: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((load[n] for n in names if isinstance(load.get(n), int) and not isinstance(load[n], bool)), None)
