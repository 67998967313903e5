"""Engines come and go: they are started, lost and replaced, added and removed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.external import NoAnswerError
from slime.ray.manager.engines.members import (
    LIVING,
    STAYING,
    Engine,
    EngineChangeError,
    Member,
    Members,
    SlotsLostError,
    State,
    abort_requests,
    in_parallel,
    wait_until_idle,
)
from slime.ray.manager.engines.served_model import RouterEndedError, ServedModel, named
from slime.ray.manager.engines.slots import EngineSlots
from slime.ray.remote import EngineDied, one_line_kind
from slime.servers.engine_client import EngineClient
from slime.servers.http import RouterError
from slime.servers.types import EngineInfo
from slime.utils import run_key
from slime.utils.run_state import record

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""To restart an engine."""
RETRY_DELAY_S = 5.0
STOP_TIMEOUT_S = 5.0
WAIT_POLL_S = 0.2


class Events(Protocol):
    """Receiver of engine failures; called from threads of the fleet."""

    def engines_failed(self, failure: EngineDied) -> None:
        """The run cannot continue: a router has ended for good, or the last engine of a model."""

    def engines_need_weights(self) -> None:
        """No engine serves the trained model any more; restarted ones could, once they have the trainer's weights."""


class Phase(Enum):
    """STARTING <-> WAITING (for the devices, while the trainer has them) -> OVER (it runs, or is given up)."""

    STARTING = "starting"
    WAITING = "waiting"
    OVER = "over"


@dataclass(eq=False)
class Replacement:
    """A ``lost`` engine whose successor is to be started; ``has_slots`` unless their node is gone and Ray has no other.

    ``thread``: the one that ends it, or starts its successor, or that did so last.
    """

    lost: Member
    thread: threading.Thread = field(init=False)
    phase: Phase = Phase.STARTING
    has_slots: bool = True
    since: float = field(default_factory=time.monotonic)

    @property
    def plan(self) -> EnginePlan:
        return self.lost.engine.plan


class EngineLifecycle:
    """The engines ``members`` of ``models``: their starts and ends, and whether they get requests.

    =================  ===========================================================================================
    ``start``          STARTING -> SERVING
    ``mark_dead``      NEW, SERVING -> DEAD; with ``--use-fault-tolerance`` a successor: STARTING -> NEW
    ``add``            STARTING -> NEW
    ``register``       NEW -> SERVING: after a push to the engines ``offered``, or at once where it needs no weights
    ``take_off``       NEW, SERVING -> DRAINING
    ``remove``         DRAINING -> forgotten
    =================  ===========================================================================================

    Where engines and trainer take turns on the devices (``plan.offload``) the successor of an engine that gets the
    trainer's weights is started only in ``wait_for_restarts``, and then holds memory for weights alone, as the others
    do before a push. That of a frozen model is started at once, or, while the engines have ``released`` memory to the
    trainer, in ``start_frozen``. An engine that others started is attached again whenever it answers. One whose node is
    gone is tried again until Ray has room for it, and not waited for.

    An added engine is like the others of its model: on slots that a removed one has left, or on a reservation of its
    own. One that is to leave gets no more requests, and ends when it holds none: after a while what it holds is
    aborted, and sent to the others with the tokens it has. Numbers of engines are not used again.
    """

    def __init__(
        self,
        args: Args,
        members: Members,
        models: Sequence[ServedModel],
        slots: EngineSlots,
        new_engine: Callable[[EnginePlan], Engine],
        events: Events,
    ) -> None:
        self.args, self.members, self.models = args, members, models
        self._slots, self._new_engine, self._events = slots, new_engine, events
        self._timeout = float(args.engine_ready_timeout)
        self.restarts = bool(args.use_fault_tolerance)
        self.stopping = threading.Event()
        """Processes that end from now on are meant to end."""
        self.offered: list[Member] = []
        """The engines that the last push of weights goes to."""
        self.no_push = threading.Event()
        """No push of weights is in progress."""
        self.no_push.set()
        self.released: set[str] = set()
        """The kinds of memory that the engines which share devices with the trainer have released."""
        self._replacements: dict[int, Replacement] = {}
        self._replacing = threading.Lock()
        """Held while replacements begin, and while all are looked through."""
        self._changes = threading.Lock()
        """Held while it is decided, and recorded, who joins and who leaves."""
        self._adding = threading.Lock()
        """Held for all of an addition: others wait for it, and engines may leave meanwhile."""
        self._ranks = itertools.count(sum(len(model.plans) for model in models))

    def start(self, plans: Sequence[EnginePlan]) -> None:
        """Start every engine and wait for the routers in parallel, then register all engines at their model's.

        The first engine that fails ends the wait for the others, with its failure.
        """
        for plan in plans:
            self.members.put(Member(self._new_engine(plan)))
        starting = self.members.all()
        pool = ThreadPoolExecutor(max(1, len(starting)), thread_name_prefix="start-engine")
        try:
            starts = [pool.submit(member.engine.start) for member in starting]
            for model in self.models:
                model.running_router.wait_ready()
            for start in wait(starts, return_when=FIRST_EXCEPTION).done:
                start.result()
        finally:
            pool.shutdown(wait=False)
        infos = {member.rank: start.result() for member, start in zip(starting, starts, strict=True)}
        for model in self.models:
            for member in model.of(*State):
                model.running_router.add_engine(infos[member.rank])
                self.members.started(member, infos[member.rank], State.SERVING)

    def end_all(self) -> None:
        """After ``stopping``: end every engine, and wait a little for the threads that were starting one."""
        in_parallel(lambda member: member.engine.end(), self.members.all())
        self._join(STOP_TIMEOUT_S, lambda plan: True)
        for member in self.members.all():
            _forget_keys(member)

    # Requests

    def register(self, member: Member) -> None:
        """Send requests to ``member``; one that cannot join its router is dead."""
        model = self.model_of(member)
        try:
            self.revive_router(model)
            model.register(member)
        except RouterEndedError as e:
            self.router_ended(e)
        except RouterError as e:
            if model.router_has_ended():
                self.register(member)  # at the next router, of which there are ROUTER_RESTARTS at most
            else:
                self.mark_dead(member, member.describe_failure(f"it cannot join the router. {e}"))

    def revive_router(self, model: ServedModel) -> None:
        """Start the router of ``model`` again if it has ended. Raises RouterEndedError when it has for good."""
        for member, reason in model.revive_router(self.stopping):
            self.mark_dead(member, reason)

    def router_ended(self, error: RouterEndedError) -> None:
        """Report that a router has ended for good."""
        if not self.stopping.is_set():
            logger.error("%s", error)
            self._events.engines_failed(EngineDied(str(error)))

    def notify_if_weights_needed(self) -> None:
        """Send the event that engines need weights, if none serves and one waits for a push, or for the devices."""
        trained = [model for model in self.models if model.update_weights]
        if not self.restarts or any(model.answers(State.SERVING) for model in trained):
            return
        names = [model.name for model in trained]
        waits = any(each.phase is Phase.WAITING and each.plan.model in names for each in self._open_replacements())
        if waits or self.members.updatable(State.NEW):
            self._events.engines_need_weights()

    def _generates(self, member: Member) -> None:
        """Send requests to a started engine that needs no weights; of another one, report it when nothing serves."""
        if self.stopping.is_set():
            return
        if self.args.debug_rollout_only or not member.engine.plan.update_weights:  # it gets no weights
            self.register(member)
        self.notify_if_weights_needed()

    # Lost engines and their successors

    def mark_dead(self, member: Member, reason: str) -> None:
        """Send ``member`` no more requests, end it, and restart it under ``--use-fault-tolerance``.

        No-op for one that is dead already. Reports the failure, or the need for weights, when its model has no engine
        left.
        """
        if self.stopping.is_set() or not self.members.change(member, LIVING, State.DEAD):
            return
        model = self.model_of(member)
        message = f"{reason}\n{model.recovery_message(member.engine.plan, restarts=self.restarts)}"
        logger.error("%s", message)
        if not self.restarts and not model.answers(State.SERVING):
            self._events.engines_failed(EngineDied(message))
        model.deregister(member)
        _forget_keys(member)
        if self.restarts:
            self._replace(member)
            self.notify_if_weights_needed()
        else:
            threading.Thread(target=member.engine.end, name=f"end-{member}", daemon=True).start()

    def wait_for_restarts(self) -> None:
        """Before a push: return when no restart of an engine that gets weights is in progress.

        Restarts that take longer than an engine may take to start continue in the background. Of engines that others
        started, which may stay away for long, one is enough.
        """
        self._join(self._timeout, lambda plan: plan.update_weights and plan.url is None)
        self._start_waiting(lambda plan: plan.update_weights)
        self._join(self._timeout, lambda plan: plan.update_weights and plan.url is None)
        deadline = time.monotonic() + self._timeout
        while self._waits_for_others() and time.monotonic() < deadline:
            if self.stopping.wait(WAIT_POLL_S):
                return

    def start_frozen(self) -> None:
        """The devices are the engines' again: start the lost engines of frozen models that waited for them."""
        self._start_waiting(lambda plan: not plan.update_weights)

    def wait_for_devices(self) -> None:
        """The devices become the trainer's: return when no engine is being started or ended on them."""
        self._join(self._timeout, lambda plan: plan.offload)

    def _replace(self, lost: Member) -> None:
        """End ``lost`` and start its successor, at once or when it has the devices."""
        plan = lost.engine.plan
        with self._replacing:
            replacement = self._replacements[lost.rank] = Replacement(lost)
            if plan.url is not None:
                _begin(replacement, self._attach_again)
            elif plan.offload and (plan.update_weights or self.released):
                replacement.phase = Phase.WAITING
                _begin(replacement, lambda each: _end(each.lost))
            else:
                _begin(replacement, self._restart)

    def _start_waiting(self, which: Callable[[EnginePlan], bool]) -> None:
        with self._replacing:
            for each in self._replacements.values():
                if each.phase is Phase.WAITING and which(each.plan):
                    each.phase = Phase.STARTING
                    _begin(each, self._restart)

    def _join(self, deadline_s: float, which: Callable[[EnginePlan], bool]) -> None:
        deadline = time.monotonic() + deadline_s
        with self._replacing:
            joined = [(each, each.thread) for each in self._replacements.values() if which(each.plan)]
        for each, thread in joined:
            while thread.is_alive() and each.has_slots and time.monotonic() < deadline:
                thread.join(min(WAIT_POLL_S, max(0.0, deadline - time.monotonic())))

    def _restart(self, replacement: Replacement) -> None:
        lost, plan, reason = replacement.lost, replacement.plan, ""
        _end(lost)
        attempt = 0
        while attempt < ATTEMPTS:
            if self._is_others_turn(replacement):
                return
            member = Member(self._new_engine(plan))
            self.members.put(member)
            if self.stopping.is_set():
                return
            (logger.warning if replacement.has_slots else logger.debug)("restarting %s", member)
            try:
                info = member.engine.start()
                replacement.has_slots = True
                if plan.offload and plan.update_weights:
                    member.keep_weights_only(EngineClient.of(info, self._timeout))
            except SlotsLostError as e:
                self.members.change(member, (State.STARTING,), State.DEAD)
                if self._waits_for_slots(replacement, e):
                    continue
                return
            except Exception as e:  # noqa: BLE001  (logged, and retried)
                attempt += 1
                replacement.has_slots = True
                self.members.change(member, (State.STARTING,), State.DEAD)
                _end(member)
                reason = one_line_kind(e)
                if self.stopping.is_set():
                    return
                logger.error("restart of %s failed (attempt %d of %d): %s", member, attempt, ATTEMPTS, reason)
                self.stopping.wait(RETRY_DELAY_S)
                continue
            self._is_back(replacement, member, info, "was restarted")
            return
        replacement.phase = Phase.OVER
        message = f"{lost} could not be restarted in {ATTEMPTS} attempts. The last error: {reason}"
        self._start_failed(lost, message, is_last=not self._is_restarting(plan))

    def _attach_again(self, replacement: Replacement) -> None:
        """Wait until the engine that others started answers, and fits, again."""
        lost, plan, said = replacement.lost, replacement.plan, ""
        _end(lost)
        while not self.stopping.wait(RETRY_DELAY_S):
            member = Member(self._new_engine(plan))
            try:
                info = member.engine.start()
            except Exception as e:  # noqa: BLE001  (logged, and retried)
                reason = one_line_kind(e)
                if not isinstance(e, NoAnswerError) and reason != said:
                    logger.error("%s cannot be attached again: %s", member, reason)
                    said = reason
                if self._all_have_been_away(plan.model):
                    message = f"{lost} has not been back for {self._timeout:g} s (--engine-ready-timeout): {reason}"
                    self._start_failed(lost, message, is_last=True)
                continue
            self.members.put(member)
            self._is_back(replacement, member, info, "answers again")
            return

    def _is_back(self, replacement: Replacement, member: Member, info: EngineInfo, how: str) -> None:
        self.members.started(member, info, State.NEW)
        replacement.phase = Phase.OVER
        logger.warning("%s %s, at %s", member, how, info.url)
        self._generates(member)

    def _start_failed(self, lost: Member, reason: str, *, is_last: bool) -> None:
        """Report that an engine is not started; ``is_last``: nor is any other of its model and kind."""
        logger.error("%s", reason)
        model = self.model_of(lost)
        if is_last and not model.answers(State.STARTING, *LIVING):
            of_model = "" if model.name == "default" else f" of model {model.name}"
            what = f"no {lost.engine.plan.kind}engine{of_model} is left: {reason}"
            self._events.engines_failed(EngineDied(what))
        self.notify_if_weights_needed()

    def _waits_for_slots(self, replacement: Replacement, error: SlotsLostError) -> bool:
        """Return, after a pause, whether to try again here: not where the next push does, or the run ends."""
        if replacement.has_slots:
            logger.error("%s. It is started as soon as a node has.", error)
            replacement.has_slots = False
        if self._all_have_been_away(replacement.plan.model):
            message = f"{error}, for {self._timeout:g} s now (--engine-ready-timeout)"
            self._start_failed(replacement.lost, message, is_last=True)
            return False
        if replacement.plan.offload:  # it may be the trainer's turn by then
            replacement.phase = Phase.WAITING
            return False
        return not self.stopping.wait(RETRY_DELAY_S)

    def _is_others_turn(self, replacement: Replacement) -> bool:
        """True if an engine of a frozen model has to wait after all, as the trainer has its devices."""
        plan = replacement.plan
        with self._replacing:
            waits = plan.offload and not plan.update_weights and bool(self.released)
            if waits:
                replacement.phase = Phase.WAITING
            return waits

    def _open_replacements(self) -> list[Replacement]:
        with self._replacing:
            return [each for each in self._replacements.values() if each.phase is not Phase.OVER]

    def _is_restarting(self, like: EnginePlan) -> bool:
        """True if a lost engine of the model and kind of ``like`` is still to be restarted."""
        kind = like.model, like.worker_type
        return any((each.plan.model, each.plan.worker_type) == kind for each in self._open_replacements())

    def _all_have_been_away(self, model: str) -> bool:
        """True if no engine of ``model`` is alive, and none has been for longer than one may take to start."""
        if self.members.of(*LIVING, model=model):
            return False
        last = max((each.since for each in self._open_replacements() if each.plan.model == model), default=0.0)
        return time.monotonic() - last > self._timeout

    def _waits_for_others(self) -> bool:
        """True if none of the engines that get weights is alive, and others have to restart one."""
        away = any(each.plan.update_weights and each.plan.url is not None for each in self._open_replacements())
        return away and not self.members.updatable(*LIVING)

    # Joining

    def add(self, model: str | None = None, count: int = 1, worker_type: str | None = None) -> list[int]:
        """Start ``count`` more engines of ``model`` (the first) in the background; return their numbers.

        ``worker_type``: of which kind, where the model has several. Raises EngineChangeError when that cannot be.
        """
        with self._adding:
            with self._changes:
                served = named(self.models, model)
                like = served.example(worker_type)
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
                    plans.append(self._slots.place(like, next(self._ranks)))
            except BaseException:
                for plan in plans:
                    self._slots.free(plan)
                raise
            with self._changes:
                members = [self._enlist(plan, served) for plan in plans]
        for member in members:
            threading.Thread(target=self._start_added, args=(member,), name=f"add-{member}", daemon=True).start()
        return [member.rank for member in members]

    def _enlist(self, plan: EnginePlan, model: ServedModel) -> Member:
        member = Member(self._new_engine(plan))
        model.plans.append(plan)
        self.members.put(member)
        self.count_engines()
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
        if self.stopping.is_set():
            return
        message = f"{member} could not be added: {reason}"
        logger.error("%s", message)
        if self.restarts and not self._is_restarting(member.engine.plan):
            self._start_failed(member, message, is_last=True)

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
            members = [self.members.numbered(rank) for rank in dict.fromkeys(ranks)]
            self._check_may_leave(members, is_forced=is_forced)
            for member in members:
                self.members.change(member, LIVING, State.DRAINING)
            self.count_engines()
        draining = [member for member in members if member.state is State.DRAINING]
        for member in draining:
            self.model_of(member).deregister(member)
        left = wait_until_idle(draining, time.monotonic() + drain_s)
        if left:
            logger.warning("%d requests of engines that are to leave are aborted, and sent to the others", left)
            abort_requests(draining)
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
        if any(member in self.offered for member in members):
            self.no_push.wait(max(0.0, deadline - time.monotonic()))
        in_parallel(lambda member: member.engine.end(), members)
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
            is_lost = member.state is State.DEAD and not self.restarts
            if not is_lost and member.state not in (*LIVING, State.DRAINING):
                raise EngineChangeError(f"{member} is being started; it can be removed when it generates")
        for model in {self.model_of(member) for member in members}:
            leaving = [member for member in members if self.model_of(member) is model]
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
        self.members.remove(member)
        _forget_keys(member)
        self.model_of(member).plans.remove(member.engine.plan)
        self._slots.free(member.engine.plan, is_lost=is_lost)
        self.count_engines()

    def _check_can_change(self, plan: EnginePlan) -> None:
        if plan.url is not None:
            raise EngineChangeError(f"{plan} was started by others, who may end it, or start it again at its address")
        if plan.offload or (self.args.colocate and plan.update_weights):
            raise EngineChangeError(
                f"{plan} shares devices with the trainer (--colocate, --offload-rollout), which passes weights to it "
                "through their memory and takes turns with it: the number of such engines is that of the start"
            )

    # Who there is

    def count_engines(self) -> None:
        """Let what limits the requests in flight know; they are counted where responses are generated."""
        engines = {
            model.name: sum(member.engine.plan.worker_type != "prefill" for member in self._staying(model))
            for model in self.models
        }
        record(self.args, sglang_model_engines=engines)

    def staying(self, model: str) -> list[Member]:
        """Return the engines of ``model`` that are not about to leave, by rank."""
        return self._staying(named(self.models, model))

    def model_of(self, member: Member) -> ServedModel:
        """Return the model of ``member``."""
        return named(self.models, member.engine.plan.model)

    def _staying(self, model: ServedModel) -> list[Member]:
        """The engines of ``model`` that are not about to leave; a lost one that is restarted counts."""
        return model.of(*STAYING, State.DEAD) if self.restarts else model.of(*STAYING)


def _begin(replacement: Replacement, work: Callable[[Replacement], None]) -> None:
    name = f"replace-{replacement.lost}"
    replacement.thread = threading.Thread(target=work, args=(replacement,), name=name, daemon=True)
    replacement.thread.start()


def _end(member: Member) -> None:
    try:
        member.engine.end()
    except Exception:  # what is left of it ends with the run
        logger.exception("ending %s", member)


def _forget_keys(member: Member) -> None:
    if member.info is not None:
        run_key.forget(member.info.url)
