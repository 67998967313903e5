"""Engines that join and leave while the fleet runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.arguments.placement import EnginePlan
from slime.ray.manager.engines.engine import RayEngine
from slime.ray.manager.engines.fleet import EngineFleet, wait_until_idle
from slime.ray.manager.engines.members import LIVING, STAYING, EngineChangeError, Member, State
from slime.ray.manager.engines.scaling import Scaling
from slime.ray.manager.engines.served_model import ServedModel
from slime.ray.remote import one_line_kind
from slime.servers.http import ServerError

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
ABORT_INTERVAL_S = 2.0


class ElasticFleet(EngineFleet):
    """A fleet to which engines are added, and from which they are taken.

    An added engine is like the others of its model: on slots that a removed one has left, or on a reservation of its
    own. It waits for the next push of weights and gets requests then; one of a frozen model gets them when it
    generates. One that is to leave gets no more requests, and ends when it holds none: after a while what it holds is
    aborted, and sent to the others with the tokens it has. Numbers of engines are not used again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scaling = Scaling(self, self._stopping)
        self._changes = threading.Lock()
        """Held while it is decided, and recorded, who joins and who leaves."""
        self._adding = threading.Lock()
        """Held for all of an addition: others wait for it, and engines may leave meanwhile."""
        self._next_rank = len(self.plans)
        self._no_push = threading.Event()
        self._no_push.set()

    def start(self) -> None:
        super().start()
        self._scaling.start()

    # Around a push of weights

    def recover(self) -> int:
        self._no_push.clear()
        return super().recover()

    def admit(self) -> None:
        super().admit()
        self._no_push.set()

    # Joining

    def add(self, model: str | None = None, count: int = 1, worker_type: str | None = None) -> list[int]:
        """Start ``count`` more engines of ``model`` (the first) in the background; return their numbers.

        ``worker_type``: of which kind, where the model has several. Raises EngineChangeError when that cannot be.
        """
        with self._adding:
            with self._changes:
                served = self._model_named(model)
                like = self._example(served, worker_type)
                self._check_can_change(like)
                most = self.args.rollout_max_engines
                number = len(self._staying(served))
                if most is not None and number + count > most:
                    raise EngineChangeError(
                        f"{served.name} has {number} engines; {count} more would exceed --rollout-max-engines {most}"
                    )
            plans: list[EnginePlan] = []
            try:
                for _ in range(count):
                    plans.append(self._place(like))
            except BaseException:
                with self._changes:
                    for plan in plans:
                        self.slots.free(plan)
                raise
            with self._changes:
                members = [self._enlist(plan, served) for plan in plans]
        for member in members:
            threading.Thread(target=self._start_added, args=(member,), name=f"add-{member}", daemon=True).start()
        return [member.rank for member in members]

    def _place(self, like: EnginePlan) -> EnginePlan:
        """Return the plan of one more engine, on free slots. Raises EngineChangeError where there are none."""
        rank = self._next_rank
        self._next_rank += 1
        with self._changes:
            plan = self.slots.take(like, rank)
        return plan or self.slots.reserve(like, rank)

    def _enlist(self, plan: EnginePlan, model: ServedModel) -> Member:
        member = Member(self._new_engine(plan))
        self._model_of[plan.rank] = model
        self.plans.append(plan)
        model.plans.append(plan)
        self.members.put(member)
        self._count_engines()
        return member

    def _start_added(self, member: Member) -> None:
        logger.warning("starting %s, which was added", member)
        try:
            info = member.engine.start()
        except Exception as e:  # noqa: BLE001  (reported; the run continues without it)
            self._give_up(member, one_line_kind(e))
            return
        self.members.started(member, info, State.NEW, is_added=True)
        waits = member.engine.plan.update_weights and not self.args.debug_rollout_only
        logger.warning("%s was added, at %s%s", member, info.url, "; it waits for weights" if waits else "")
        self._generates(member)

    def _give_up(self, member: Member, reason: str) -> None:
        self.members.change(member, (State.STARTING,), State.DEAD)
        member.engine.end()
        with self._changes:
            self._delist(member)
        if self._stopping.is_set():
            return
        message = f"{member} could not be added: {reason}"
        logger.error("%s", message)
        if self._restarts is not None and not self._restarts.is_restarting(member.engine.plan):
            self._restart_failed(member, message, is_last=True)

    # Leaving

    def take_off(self, ranks: Sequence[int], drain_s: float, *, is_forced: bool = False) -> int:
        """Send no more requests to the engines ``ranks``; return when they hold none.

        What they hold after ``drain_s`` seconds is aborted; the return value is how many requests that were. They run
        until ``remove``. ``is_forced``: regardless of ``--rollout-min-engines``. Raises EngineChangeError when one of
        them has to stay.
        """
        return self._take_off(ranks, drain_s, is_forced=is_forced)[1]

    def _take_off(self, ranks: Sequence[int], drain_s: float, *, is_forced: bool) -> tuple[list[Member], int]:
        with self._changes:
            members = [self._member(rank) for rank in dict.fromkeys(ranks)]
            self._check_may_leave(members, is_forced=is_forced)
            for member in members:
                self.members.change(member, LIVING, State.DRAINING)
            self._count_engines()
        draining = [member for member in members if member.state is State.DRAINING]
        for member in draining:
            self._model_of[member.rank].deregister(member)
        left = wait_until_idle(draining, time.monotonic() + drain_s)
        if left:
            logger.warning("%d requests of engines that are to leave are aborted, and sent to the others", left)
            _abort(draining)
        return members, left

    def remove(self, ranks: Sequence[int], drain_s: float, *, is_forced: bool = False, are_lost: bool = False) -> int:
        """``take_off``, and end the engines; their slots are free unless they ``are_lost``.

        One that a push in progress goes to ends after it, but no later than after ``drain_s``: the push is repeated
        without it then.
        """
        deadline = time.monotonic() + drain_s
        members, aborted = self._take_off(ranks, drain_s, is_forced=is_forced)
        if not members:
            return aborted
        if any(member in self._offered for member in members):
            self._no_push.wait(max(0.0, deadline - time.monotonic()))
        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(lambda member: member.engine.end(), members))
        with self._changes:
            for member in members:
                if member in self.members.all():  # unless it was asked for twice
                    self._delist(member, is_lost=are_lost)
                    self.members.removed += 1
                    logger.warning("%s was removed", member)
        return aborted

    def _check_may_leave(self, members: Sequence[Member], *, is_forced: bool) -> None:
        for member in members:
            self._check_can_change(member.engine.plan)
            is_lost = member.state is State.DEAD and self._restarts is None
            if not is_lost and member.state not in (*LIVING, State.DRAINING):
                raise EngineChangeError(f"{member} is being started; it can be removed when it generates")
        for model in {self._model_of[member.rank] for member in members}:
            leaving = [member for member in members if self._model_of[member.rank] is model]
            staying = [member for member in self._staying(model) if member not in leaving]
            least = 0 if is_forced else self.args.rollout_min_engines
            names = ", ".join(map(str, leaving))
            if len(staying) < least and any(member.state in STAYING for member in leaving):
                raise EngineChangeError(
                    f"{names} cannot be removed: {len(staying)} engines would be left, fewer than "
                    f"--rollout-min-engines {least}"
                )
            for kind in {m.engine.plan.worker_type for m in leaving if m.state is State.SERVING}:
                if not any(m.state is State.SERVING and m.engine.plan.worker_type == kind for m in staying):
                    raise EngineChangeError(
                        f"{names} cannot be removed: no other {kind} engine of model {model.name} gets requests"
                    )

    def _delist(self, member: Member, *, is_lost: bool = False) -> None:
        plan = member.engine.plan
        self.members.remove(member)
        self._forget_keys(member)
        self.plans.remove(plan)
        self._model_of[plan.rank].plans.remove(plan)
        self.slots.free(plan, is_lost=is_lost)
        self._count_engines()

    # Who there is

    def counts(self) -> dict[str, int]:
        """Return the metrics of engine faults, and of engines that have joined or left where any has."""
        counts = super().counts()
        if self.members.added or self.members.removed:
            serving = len(self.members.of(State.SERVING))
            changes = {"serving": serving, "added": self.members.added, "removed": self.members.removed}
            counts |= {f"rollout/engines/{name}": count for name, count in changes.items()}
        return counts

    def staying(self, model: str) -> list[Member]:
        """Return the engines of ``model`` that are not about to leave, by rank."""
        return self._staying(self._model_named(model))

    def on_nodes(self, nodes: Set[str]) -> list[int]:
        """Return the engines that have a process on one of ``nodes``, and that slime started."""
        found = []
        for member in self.members.of(*LIVING):
            engine = member.engine
            if isinstance(engine, RayEngine) and not nodes.isdisjoint(engine.nodes()):
                found.append(member.rank)
        return found

    def _member(self, rank: int) -> Member:
        members = self.members.all()
        for member in members:
            if member.rank == rank:
                return member
        raise EngineChangeError(f"there is no engine {rank}; there are {', '.join(str(m.rank) for m in members)}")

    def _model_named(self, name: str | None) -> ServedModel:
        for model in self.models:
            if name in (None, model.name):
                return model
        raise EngineChangeError(f"no model {name!r} is served; there are {', '.join(m.name for m in self.models)}")

    def _example(self, model: ServedModel, worker_type: str | None) -> EnginePlan:
        for plan in model.plans:
            if worker_type in (None, plan.worker_type):
                return plan
        kinds = ", ".join(sorted({plan.worker_type for plan in model.plans})) or "none"
        raise EngineChangeError(f"model {model.name} has no {worker_type or ''} engine to start another like: {kinds}")

    def _check_can_change(self, plan: EnginePlan) -> None:
        if plan.url is not None:
            raise EngineChangeError(f"{plan} was started by others, who may end it, or start it again at its address")
        if plan.offload or (self.args.colocate and plan.update_weights):
            raise EngineChangeError(
                f"{plan} shares devices with the trainer (--colocate, --offload-rollout), which passes weights to it "
                "through their memory and takes turns with it: the number of such engines is that of the start"
            )


def _abort(members: Sequence[Member]) -> None:
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
