"""Calls to the run's remote processes: waits with a name and a deadline, failures reported with their cause first."""

from __future__ import annotations

import functools
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.utils import shared_memory
from slime.utils.structured_error import ErrorData, StructuredError, data_of, merged

if TYPE_CHECKING:

    class RemoteMethod(Protocol):
        """A method of an actor: a call of it returns the reference to its result."""

        def remote(self, *args: object, **kwargs: object) -> Any: ...

    class RemoteActor(Protocol):
        """The handle of an actor, which has nothing but its methods."""

        def __getattr__(self, name: str) -> RemoteMethod: ...


logger = logging.getLogger(__name__)

HEARTBEAT_LOG_S = 60.0
"""Interval at which a wait logs what it waits for."""
ROOT_CAUSE_GRACE_S = 3.0
"""Time to look for the root cause after the first failure."""
DAY_S = 24 * 3600.0
PING_EVERY_S = 2.0
F = TypeVar("F", bound=Callable[..., Any])
LAST_LINES = 20


# Failures


class RemoteFailure(StructuredError):
    """An exception inside one of the run's actors: its type and message, its traceback as text (``details``), and its
    data.
    """

    def __init__(self, message: str, details: str = "", data: ErrorData | None = None) -> None:
        super().__init__(message, data)
        self.message = message
        self.details = details


class EngineDied(StructuredError):
    """An engine or router process ended while the run needed it. The message holds its last log lines."""


class EnginesNeedWeights(EngineDied):
    """Every engine was lost, and those that were restarted wait for the trainer's weights."""


def reports_errors(method: F) -> F:
    """Decorate an actor method: exceptions reach the caller as a ``RemoteFailure``.

    Exceptions of other packages may not survive pickling, and Ray's rendering of them buries the message.
    """

    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return method(*args, **kwargs)
        except (RemoteFailure, EngineDied):
            raise
        except Exception as e:  # noqa: BLE001  (re-raised in a form that travels)
            raise RemoteFailure(one_line_kind(e), clean_traceback(e), data_of(e)) from None

    return call  # type: ignore[return-value]


def one_line_kind(error: BaseException) -> str:
    """Return ``Type: message`` of the root exception, with its notes."""
    root = _root(error)
    text = str(root)
    if isinstance(root, (RemoteFailure, EngineDied)):
        return text
    notes = "".join(f"\n  {note}" for note in getattr(root, "__notes__", ()))
    return (f"{type(root).__name__}: {text}" if text else type(root).__name__) + notes


def _root(error: BaseException) -> BaseException:
    """Return what was raised in an actor, where ``error`` is Ray's word for it."""
    return error.cause if isinstance(error, RayTaskError) and error.cause is not None else error


def clean_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` and its causes without the frames of Ray and of this module."""
    kept: list[str] = []
    for chunk in traceback.format_exception(error):
        if "/site-packages/ray/" in chunk.split("\n", 1)[0] or f'"{__file__}"' in chunk.split("\n", 1)[0]:
            continue
        kept.append(chunk)
    return "".join(kept).rstrip()


def describe(error: BaseException, name: str, what: str, log: Path | None) -> RemoteFailure:
    """Return the failure of the actor ``name`` during ``what``: the original message first, then where."""
    if isinstance(error, RayActorError):
        # Ray's actor errors are paragraphs; the line with the reason is enough.
        text = str(error).partition("Worker exit detail:")[2] or str(error)
        lines = [line.strip() for line in text.partition("Some common causes")[0].splitlines() if line.strip()]
        reason = lines[0] if lines else "no reason given"
        said = last_lines(log)
        return RemoteFailure(f"{name} ended unexpectedly during {what}: {reason}{said}{shared_memory.hint(said)}", "")
    if isinstance(error, GetTimeoutError):
        return RemoteFailure(f"{name} did not answer during {what}: {error}")
    cause = _root(error)
    details = cause.details if isinstance(cause, RemoteFailure) else clean_traceback(cause)
    kind = one_line_kind(cause)
    where = "" if name in kind else f"\n  in {name}, during {what}"
    return RemoteFailure(f"{kind}{where}" + (f"\n  log: {log}" if log else ""), details, data_of(cause))


def is_secondary(error: BaseException) -> bool:
    """True when ``error`` looks like the consequence of another rank's end rather than a cause."""
    return data_of(_root(error)).get("peer_lost", False)


def last_lines(log: Path | None, n: int = LAST_LINES) -> str:
    """Return the end of a log file of this host as text to append to a message, empty when there is none."""
    if log is None or not log.is_file():
        return ""
    with open(log, "rb") as f:
        f.seek(max(0, f.seek(0, 2) - 16384))
        lines = f.read().decode(errors="replace").splitlines()[-n:]
    return f"\nThe last lines of {log}:\n" + "\n".join(f"  | {line}" for line in lines)


# Waits


@dataclass(frozen=True)
class Peer:
    """The other side of a remote call, for messages. ``log`` is its log file when that is on this host."""

    name: str
    log: Path | None = None


class Liveness(Protocol):
    """A check that runs during a wait, of processes beside those that it waits for."""

    def check(self, what: str) -> None: ...  # raises when the wait ``what`` cannot end


class LivenessMonitor:
    """Checks that the processes of ``actors``, which answer ``ping``, are alive; ``peers`` name them in messages.

    A busy process answers later: only its end is a failure.
    """

    def __init__(self, actors: Sequence[Any], peers: Sequence[Peer]) -> None:
        self._actors, self._peers = list(actors), list(peers)
        self._pings: dict[Any, int] = {}
        self._asked = 0.0
        self._stopped = StoppedProcesses()

    def check(self, what: str) -> None:
        """Raise RemoteFailure naming the process that has ended. ``what`` names the wait in progress."""
        if self._pings:
            answered, _ = ray.wait(list(self._pings), num_returns=len(self._pings), timeout=0, fetch_local=False)
            for ref in answered:
                peer = self._peers[self._pings.pop(ref)]
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as e:
                    raise describe(e, peer.name, what, peer.log) from None
        self._stopped.look(what, ((peer.name, peer.log) for peer in self._peers))
        now = time.monotonic()
        if now - self._asked >= PING_EVERY_S:
            self._asked = now
            waiting = set(self._pings.values())
            for number, actor in enumerate(self._actors):
                if number not in waiting:
                    self._pings[actor.ping.remote()] = number


def wait_all(
    refs: Sequence[Any],
    peers: Sequence[Peer],
    what: str,
    deadline_s: float,
    watch: Sequence[Any] = (),
    liveness: Sequence[Liveness] = (),
) -> list[Any]:
    """Return the results of ``refs`` in order; raise as soon as any of them fails.

    ``watch`` are references that only ever resolve to an error (an engine died): then that error is raised at once.
    ``liveness`` monitors are checked every second; they raise when another process of the run has ended.
    Raises RemoteFailure with the original message first, TimeoutError naming who did not answer within ``deadline_s``.
    """
    started = time.monotonic()
    next_sign = HEARTBEAT_LOG_S
    pending = list(refs)
    stopped = StoppedProcesses()
    watched = [ref for ref in watch if ref is not None]
    while pending:
        for ref, error in _wait_for_one(pending, watched, 1.0):
            raise _cause(error, ref, refs, peers, what, watched) from None
        for monitor in liveness if pending else ():
            monitor.check(what)
        stopped.look(what, ((peer.name, peer.log) for ref, peer in zip(refs, peers, strict=True) if ref in pending))
        waited = time.monotonic() - started
        if pending and waited > deadline_s:
            raise TimeoutError(f"{what}: no answer from {_names(pending, refs, peers)} within {deadline_s:.0f} s")
        if pending and waited > next_sign:
            next_sign += HEARTBEAT_LOG_S
            logger.info("%s: waiting for %s for %.0f s", what, _names(pending, refs, peers), waited)
    return [ray.get(ref) for ref in refs]


def wait_one(
    ref: object,
    peer: Peer,
    what: str,
    deadline_s: float,
    watch: Sequence[Any] = (),
    liveness: Sequence[Liveness] = (),
) -> Any:
    """Return the result of one remote call; see ``wait_all``."""
    return wait_all([ref], [peer], what, deadline_s, watch, liveness)[0]


def results_so_far(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the results of those ``refs`` that arrive within ``timeout_s`` and are not failures."""
    if not refs:
        return []
    found = []
    for ref in ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]:
        try:
            found.append(ray.get(ref))
        except ray.exceptions.RayError as e:
            logger.debug("not answered: %s", one_line_kind(e))
    return found


def _names(pending: Sequence[Any], refs: Sequence[Any], peers: Sequence[Peer]) -> str:
    return ", ".join(peer.name for ref, peer in zip(refs, peers, strict=True) if ref in pending)


def _wait_for_one(pending: list[Any], watched: list[Any], timeout_s: float) -> list[tuple[Any, Exception]]:
    """Wait until one reference is done and take it off its list; return it with its error if it failed.

    A watched one that fails is raised.
    """
    failed: list[tuple[Any, Exception]] = []
    for ref in ray.wait(pending + watched, num_returns=1, timeout=timeout_s, fetch_local=False)[0]:
        is_watched = ref in watched
        (watched if is_watched else pending).remove(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayError as e:
            if not is_watched:
                failed.append((ref, e))
            elif isinstance(e, RayTaskError):
                cause = _root(e)
                known = isinstance(cause, (EngineDied, RemoteFailure))
                raise cause if known else RemoteFailure(one_line_kind(e), data=data_of(cause)) from None
            else:
                raise describe(e, "the rollout manager", "the run", None) from None
    return failed


def _cause(
    error: Exception, failed: object, refs: Sequence[Any], peers: Sequence[Peer], what: str, watched: Sequence[Any]
) -> Exception:
    """Return the failure to report: of those that arrive soon, the first that is not a consequence of another."""
    names = dict(zip(refs, peers, strict=True))
    failures = [(failed, error)]
    if is_secondary(error) or len(refs) > 1 or watched:
        others = [ref for ref in refs if ref != failed]
        watching = list(watched)
        deadline = time.monotonic() + ROOT_CAUSE_GRACE_S
        while (others or watching) and time.monotonic() < deadline:
            failures += _wait_for_one(others, watching, 0.2)
            if not watching and not all(is_secondary(e) for _, e in failures):
                break
    first = next((f for f in failures if not is_secondary(f[1])), failures[0])
    report = describe(first[1], names[first[0]].name, what, names[first[0]].log)
    rest = [f"{names[ref].name}: {one_line_kind(e).splitlines()[0]}" for ref, e in failures if ref != first[0]]
    if rest:
        data = merged([report.data, *(data_of(_root(e)) for _, e in failures if not is_secondary(e))])
        report = RemoteFailure(report.message + "\n  then also " + "; ".join(rest), report.details, data)
    return report


# Processes of this host that are waited for and do not run: stopped by a signal (SIGSTOP), or by a debugger

LOOK_EVERY_S = 10.0


class StoppedProcesses:
    """Warns, once per process and stop, that one of those whose output goes to certain logs is stopped."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._known: set[int] = set()

    def look(self, what: str, names: Iterable[tuple[str, Path | None]]) -> None:
        """Look every ``LOOK_EVERY_S`` at most. ``what`` waits for ``names``, each with its log."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        logs = {str(log): name for name, log in names if log is not None}
        stopped = dict(_stopped(logs))
        for pid in stopped.keys() - self._known:
            logger.warning(
                "%s waits for %s, whose process %d is stopped, by SIGSTOP or a debugger: kill -CONT %d resumes it",
                what, logs[stopped[pid]], pid, pid,
            )  # fmt: skip
        self._known = set(stopped)


def _stopped(logs: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the stopped processes whose output goes to one of ``logs``, and that log."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                log = os.readlink(directory / "fd" / "1")
                if log in logs:
                    yield int(directory.name), log
        except OSError:
            continue  # ended meanwhile, or another user's
