"""The engines of a fleet, and what state each is in."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from slime.arguments.placement import EnginePlan
from slime.ray.remote import RemoteFailure
from slime.servers.types import EngineInfo


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

    ``released``: which parts of its memory it has released (``offload.TAGS``). ``rejected``: when answers of it were
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

    def __str__(self) -> str:
        return str(self.engine.plan)

    def describe_failure(self, what: str) -> str:
        """Return why this member is considered dead, with its last log lines; its process may still run."""
        lines = "".join(f"\n  | {line}" for line in self.engine.last_lines())
        return f"{self} ({self.known_info.url}): {what}" + (f"\nIts last log lines:{lines}" if lines else "")


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
