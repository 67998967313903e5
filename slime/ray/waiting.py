"""Waiting for remote calls: every wait has a name, a deadline and a sign of life, and ends when what it needs ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from slime.ray.errors import EngineDied, RemoteFailure, describe, is_secondary, one_line_kind

logger = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 60.0
"""After this long, and every time it has passed again, a wait says who waits for whom."""
OTHERS_GRACE_S = 3.0
"""After the first failure, how long to look for the failure that caused it."""
DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Peer:
    """The other side of a remote call, for messages. ``log`` is its log file when that is on this host."""

    name: str
    log: Path | None = None


class Watched(Protocol):
    """Processes that nobody waits for (``slime.ray.lives.Lives``)."""

    def check(self, what: str) -> None: ...


def wait_all(
    refs: Sequence[Any],
    peers: Sequence[Peer],
    what: str,
    deadline_s: float,
    watch: Sequence[Any] = (),
    lives: Sequence[Watched] = (),
) -> list[Any]:
    """Return the results of ``refs`` in order; raise as soon as any of them fails.

    ``watch`` are references that only ever resolve to an error (an engine died): then that error is raised at once.
    ``lives`` are asked every second, and raise, whether other processes of the run are there.
    Raises RemoteFailure with the original message first, TimeoutError naming who did not answer within ``deadline_s``.
    """
    started = time.monotonic()
    next_sign = SIGN_OF_LIFE_S
    pending = list(refs)
    watched = [ref for ref in watch if ref is not None]
    while pending:
        ready, _ = ray.wait(pending + watched, num_returns=1, timeout=1.0, fetch_local=False)
        for ref in ready:
            if ref in watched:
                _raise_watched(ref)
                watched.remove(ref)
                continue
            try:
                ray.get(ref)
            except ray.exceptions.RayError as e:
                raise _cause(e, ref, refs, peers, what, watched) from None
            pending.remove(ref)
        for others in lives if pending else ():
            others.check(what)
        waited = time.monotonic() - started
        if pending and waited > deadline_s:
            raise TimeoutError(f"{what}: no answer from {_names(pending, refs, peers)} within {deadline_s:.0f} s")
        if pending and waited > next_sign:
            next_sign += SIGN_OF_LIFE_S
            logger.info("%s: waiting for %s for %.0f s", what, _names(pending, refs, peers), waited)
    return [ray.get(ref) for ref in refs]


def wait_one(
    ref: Any, peer: Peer, what: str, deadline_s: float, watch: Sequence[Any] = (), lives: Sequence[Watched] = ()
) -> Any:
    """Return the result of one remote call; see ``wait_all``."""
    return wait_all([ref], [peer], what, deadline_s, watch, lives)[0]


def results_so_far(refs: Sequence[Any], patience_s: float) -> list[Any]:
    """Return the results of those ``refs`` that come within ``patience_s`` and are no failures."""
    if not refs:
        return []
    found = []
    for ref in ray.wait(list(refs), num_returns=len(refs), timeout=patience_s)[0]:
        try:
            found.append(ray.get(ref))
        except ray.exceptions.RayError as e:
            logger.debug("not answered: %s", one_line_kind(e))
    return found


def _names(pending: Sequence[Any], refs: Sequence[Any], peers: Sequence[Peer]) -> str:
    return ", ".join(peer.name for ref, peer in zip(refs, peers, strict=True) if ref in pending)


def _raise_watched(ref: Any) -> None:
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as e:
        cause = e.cause if e.cause is not None else e
        raise cause if isinstance(cause, (EngineDied, RemoteFailure)) else RemoteFailure(one_line_kind(e)) from None
    except ray.exceptions.RayError as e:
        raise describe(e, "the rollout manager", "the run", None) from None


def _cause(
    error: Exception, failed: Any, refs: Sequence[Any], peers: Sequence[Peer], what: str, watched: Sequence[Any]
) -> Exception:
    """Return the failure to report: of those that come within a short time the first that is no mere consequence."""
    names = dict(zip(refs, peers, strict=True))
    failures = [(failed, error)]
    if is_secondary(error) or len(refs) > 1 or watched:
        others = [ref for ref in refs if ref != failed]
        watching = list(watched)
        deadline = time.monotonic() + OTHERS_GRACE_S
        while (others or watching) and time.monotonic() < deadline:
            ready, _ = ray.wait(others + watching, num_returns=1, timeout=0.2, fetch_local=False)
            for ref in ready:
                if ref in watching:
                    _raise_watched(ref)
                    watching.remove(ref)
                    continue
                others.remove(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as e:
                    failures.append((ref, e))
            if not watching and not all(is_secondary(e) for _, e in failures):
                break
    first = next((f for f in failures if not is_secondary(f[1])), failures[0])
    report = describe(first[1], names[first[0]].name, what, names[first[0]].log)
    rest = [f"{names[ref].name}: {one_line_kind(e).splitlines()[0]}" for ref, e in failures if ref != first[0]]
    if rest:
        report = RemoteFailure(report.message + "\n  then also " + "; ".join(rest), report.details)
    return report
