"""The engines of a fleet, and what state each is in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slime.arguments.placement import EnginePlan
from slime.servers.types import EngineInfo


class Engine(Protocol):
    """What a fleet needs of an engine (``engine.RayEngine``). It is started once and ended once."""

    plan: EnginePlan

    def start(self) -> EngineInfo: ...
    def pull_weights(self, directory: str, deadline_s: float) -> str: ...
    def poll(self) -> str | None: ...
    def last_lines(self) -> list[str]: ...
    def end(self) -> None: ...


class State(Enum):
    """STARTING -> NEW (generates, but has not the trainer's weights) -> SERVING (on the router) -> DEAD."""

    STARTING = "starting"
    NEW = "new"
    SERVING = "serving"
    DEAD = "dead"


LIVING = (State.NEW, State.SERVING)


@dataclass(eq=False)
class Member:
    """One incarnation of an engine: when it is restarted, another member takes its place."""

    engine: Engine
    state: State = State.STARTING
    info: EngineInfo | None = None

    @property
    def rank(self) -> int:
        return self.engine.plan.rank

    @property
    def known_info(self) -> EngineInfo:
        """Where it is reached; only of members that have started."""
        assert self.info is not None, f"{self} has not been started"
        return self.info

    def __str__(self) -> str:
        return f"engine {self.rank}"

    def describe_failure(self, what: str) -> str:
        """Return why this member is considered dead, with its last log lines; its process may still run."""
        lines = "".join(f"\n  | {line}" for line in self.engine.last_lines())
        return f"{self} ({self.known_info.url}): {what}" + (f"\nIts last log lines:{lines}" if lines else "")


class Members:
    """One member per engine of the plan. Every change of state happens here, under a lock.

    ``lost`` and ``restarted`` count engines that died and engines that were restarted.
    """

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._lock = threading.Lock()
        self.lost = self.restarted = 0

    def put(self, member: Member) -> None:
        """Give ``member`` the place of its engine."""
        with self._lock:
            self._members[member.rank] = member

    def of(self, *states: State) -> list[Member]:
        """Return the members in one of ``states``, by rank."""
        with self._lock:
            return [m for _, m in sorted(self._members.items()) if m.state in states]

    def all(self) -> list[Member]:
        """Return all members, by rank."""
        return self.of(*State)

    def change(self, member: Member, before: Sequence[State], after: State) -> bool:
        """Put ``member`` into the state ``after`` if it is in one of ``before``; return whether it was."""
        with self._lock:
            if member.state not in before:
                return False
            member.state = after
            self.lost += after is State.DEAD and State.STARTING not in before
            return True

    def started(self, member: Member, info: EngineInfo, state: State) -> None:
        """Record that a starting member generates."""
        with self._lock:
            member.info, member.state = info, state
            self.restarted += state is State.NEW


def recovery_message(serving: int, planned: int, *, restarts: bool) -> str:
    """Describe how the run continues after the loss of an engine: with ``serving`` of ``planned`` engines."""
    remaining = f"{serving} of {planned} engines continue; requests of the lost one are sent to them."
    if restarts:
        restarted = "It is restarted, and serves from the next weight sync on."
        return f"{remaining if serving else 'It was the last one that served.'} {restarted}"
    if serving:
        return f"{remaining} With --use-fault-tolerance it would be restarted."
    return "No engine is left. With --use-fault-tolerance engines are restarted."
