"""The engines of a fleet, and what state each and its memory is in."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from slime.arguments.placement import EnginePlan
from slime.ray.remote import RemoteFailure
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineTimeoutError, ServerError
from slime.servers.types import EngineInfo

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""The parts of an engine's memory."""
DRAIN_S, DRAIN_POLL_S = 30.0, 0.1
DRAIN_INTERVAL_S = 0.5
ABORT_DEADLINE_S, ABORT_INTERVAL_S = 30.0, 2.0

logger = logging.getLogger(__name__)


class EngineChangeError(RemoteFailure):
    """Engines cannot be added or removed like that; nothing has been changed."""


class Engine(Protocol):
    """The part of an engine that a fleet uses (``engine.RayEngine``). It is started once and ended once."""

    plan: EnginePlan

    def start(self) -> EngineInfo: ...  # raises SlotsLostError before anything is started
    def pull_weights(self, directory: str, deadline_s: float) -> str: ...
    def poll(self) -> str | None: ...
    def last_lines(self) -> list[str]: ...
    def end(self) -> None: ...


class SlotsLostError(RuntimeError):
    """An engine cannot be started now: the node of its slots is gone, and Ray has found no other room for them yet."""


class State(Enum):
    """STARTING -> NEW (generates, but has not the trainer's weights) -> SERVING (on the router) -> DEAD.

    An engine of a model that gets no weights is NEW only until it is on the router. One that is to leave is DRAINING
    from NEW or SERVING on: it gets neither requests nor weights.
    """

    STARTING = "starting"
    NEW = "new"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


LIVING = (State.NEW, State.SERVING)
STAYING = (State.STARTING, *LIVING)


@dataclass(eq=False)
class Member:
    """One incarnation of an engine: when it is restarted, another member takes its place.

    ``released``: which parts of its memory it has released (``MEMORY_TAGS``). ``rejected``: when answers of it were
    rejected, the latest ones.
    """

    engine: Engine
    state: State = State.STARTING
    info: EngineInfo | None = None
    released: set[str] = field(default_factory=set)
    rejected: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def rank(self) -> int:
        return self.engine.plan.rank

    @property
    def known_info(self) -> EngineInfo:
        """Its addresses, GPUs and keys; only of members that have started."""
        assert self.info is not None, f"{self} has not been started"
        return self.info

    @property
    def client(self) -> EngineClient:
        """A client of it; only of members that have started."""
        return EngineClient.of(self.known_info)

    def __str__(self) -> str:
        return str(self.engine.plan)

    def describe_failure(self, what: str) -> str:
        """Return why this member is considered dead, with its last log lines; its process may still run."""
        lines = "".join(f"\n  | {line}" for line in self.engine.last_lines())
        return f"{self} ({self.known_info.url}): {what}" + (f"\nIts last log lines:{lines}" if lines else "")

    # Engines that share their devices with the trainer release their memory while it is the trainer's turn

    def release_memory(self) -> None:
        """Release what has not been released.

        A frozen model may be asked at any time, by rewards that no rollout waits for any more: what it works on has
        ``DRAIN_S`` to end, and what comes then waits until it has its memory again.
        """
        left, client = [tag for tag in MEMORY_TAGS if tag not in self.released], self.client
        if not left:
            return
        if not self.engine.plan.update_weights:
            deadline = time.monotonic() + DRAIN_S
            while client.num_requests() and time.monotonic() < deadline:
                time.sleep(DRAIN_POLL_S)
            client.pause("abort")
        client.release_memory(*([left] if self.released else []))
        self.released = set(MEMORY_TAGS)

    def resume_memory(self, tags: Iterable[str]) -> None:
        """Take back those parts in ``tags`` that are released.

        A frozen model needs its weights for nothing but generation: it takes them back with the rest, when the trainer
        has left the devices.
        """
        due = self.released.intersection(tags)
        frozen = not self.engine.plan.update_weights
        if frozen:
            due = due | (self.released & {"weights"}) if due - {"weights"} else set()
        if not due:
            return
        self.client.resume_memory(None if len(due) == len(MEMORY_TAGS) else [tag for tag in MEMORY_TAGS if tag in due])
        self.released = self.released - due
        if frozen and not self.released:
            self.client.resume()

    def keep_weights_only(self, client: EngineClient) -> None:
        """Bring a restarted engine, reached by ``client``, to the state of the others before a push."""
        client.release_memory()
        client.resume_memory(["weights"])
        self.released = set(MEMORY_TAGS) - {"weights"}


class Members:
    """One member per engine of the plan. Every change of state happens here, under a lock.

    ``lost_of`` and ``restarted_of`` count engines that died and engines that were restarted, ``rejected_of`` answers
    that were not used, by model; ``added`` and ``removed`` engines that joined and left while the fleet runs.
    """

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._lock = threading.Lock()
        self.lost_of: Counter[str] = Counter()
        self.restarted_of: Counter[str] = Counter()
        self.rejected_of: Counter[str] = Counter()
        self.added = self.removed = 0

    @property
    def lost(self) -> int:
        """The number of engines that have died."""
        return self.lost_of.total()

    @property
    def restarted(self) -> int:
        """The number of engines that were restarted."""
        return self.restarted_of.total()

    def put(self, member: Member) -> None:
        """Give ``member`` the place of its engine."""
        with self._lock:
            self._members[member.rank] = member

    def remove(self, member: Member) -> None:
        """Forget ``member``, which has ended."""
        with self._lock:
            del self._members[member.rank]

    def of(self, *states: State, model: str | None = None) -> list[Member]:
        """Return the members in one of ``states``, of ``model`` or of all, by rank."""
        with self._lock:
            found = [m for _, m in sorted(self._members.items()) if m.state in states]
        return found if model is None else [m for m in found if m.engine.plan.model == model]

    def all(self) -> list[Member]:
        """Return all members, by rank."""
        return self.of(*State)

    def updatable(self, *states: State) -> list[Member]:
        """Return the members in one of ``states`` that get the trainer's weights, by rank."""
        return [member for member in self.of(*states) if member.engine.plan.update_weights]

    def numbered(self, rank: int) -> Member:
        """Return the member of engine ``rank``. Raises EngineChangeError where there is none."""
        members = self.all()
        for member in members:
            if member.rank == rank:
                return member
        raise EngineChangeError(f"there is no engine {rank}; there are {', '.join(str(m.rank) for m in members)}")

    def change(self, member: Member, before: Sequence[State], after: State) -> bool:
        """Put ``member`` into the state ``after`` if it is in one of ``before``; return whether it was."""
        with self._lock:
            if member.state not in before:
                return False
            member.state = after
            if after is State.DEAD and State.STARTING not in before:
                self.lost_of[member.engine.plan.model] += 1
            return True

    def started(self, member: Member, info: EngineInfo, state: State, *, is_added: bool = False) -> None:
        """Record that a starting member generates: from the start on, restarted (NEW) or added (NEW)."""
        with self._lock:
            member.info, member.state = info, state
            if is_added:
                self.added += 1
            elif state is State.NEW:
                self.restarted_of[member.engine.plan.model] += 1


def in_parallel(action: Callable[[Member], Any], members: Sequence[Member]) -> list[Any]:
    """Do ``action`` on all ``members`` at once; return the results."""
    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(action, members))


def wait_until_idle(members: Sequence[Member], deadline: float) -> int:
    """Return how many requests ``members`` hold: some only when it has become ``deadline``.

    One that does not answer in time may be at work, and counts as one request.
    """
    was_idle = False
    while (left := sum(in_parallel(_requests_of, members))) or not was_idle:
        if time.monotonic() >= deadline:
            break
        was_idle = not left  # the reply of the last request may still be in transit
        time.sleep(DRAIN_INTERVAL_S)
    return left


def _requests_of(member: Member) -> int:
    """Return the number of requests of ``member``: 0 where it has ended, 1 where it runs and does not report it."""
    try:
        return member.client.num_requests()
    except ServerError as e:
        is_there = e.status is not None or isinstance(e, EngineTimeoutError)
        return 1 if is_there and member.engine.poll() is None else 0


def abort_requests(members: Sequence[Member]) -> None:
    """Abort what ``members`` hold, and wait until it is answered; one that has ended holds nothing any more."""
    deadline = time.monotonic() + ABORT_DEADLINE_S
    while time.monotonic() < deadline:
        for member in members:
            try:
                member.client.abort_all()
            except ServerError as e:
                logger.warning("%s does not abort its requests: %s", member, e)
        # The router may have been about to send one.
        if not wait_until_idle(members, time.monotonic() + ABORT_INTERVAL_S):
            return
    logger.error("engines that are to leave still hold requests %g s after the abort", ABORT_DEADLINE_S)
