"""Dead engines are restarted in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.external import NoAnswerError
from slime.ray.manager.engines.members import LIVING, Engine, Member, Members, SlotsLostError, State
from slime.ray.remote import one_line_kind
from slime.servers.engine_client import EngineClient

logger = logging.getLogger(__name__)

ATTEMPTS = 3
RETRY_DELAY_S = 5.0
STOP_TIMEOUT_S = 5.0
WAIT_POLL_S = 0.2


class EngineRestarts:
    """One thread per engine that is being replaced.

    Where engines and trainer take turns on the devices (``plan.offload``) an engine that gets the trainer's weights is
    started only in ``wait_for_all``, and then holds memory for weights alone, as the others do before a push. One of a
    frozen model is started at once, or, while ``trainer_has_devices()``, in ``start_frozen``.
    ``on_restart(member)`` is called when an engine generates again, ``on_failure(lost, reason, is_last=...)`` when it
    does not after all attempts; ``is_last`` when no other engine of its kind is being restarted either. An engine that
    others started is attached again whenever it answers; ``on_failure`` when for as long as an engine may take to start
    none of its model has. An engine whose node is gone is tried again until Ray has room for it, and not waited for.
    """

    def __init__(
        self,
        args: Args,
        members: Members,
        new_engine: Callable[[EnginePlan], Engine],
        on_restart: Callable[[Member], None],
        on_failure: Callable[..., None],
        trainer_has_devices: Callable[[], bool],
    ) -> None:
        self._timeout = float(args.engine_ready_timeout)
        self._members, self._new_engine = members, new_engine
        self._on_restart, self._on_failure = on_restart, on_failure
        self._trainer_has_devices = trainer_has_devices
        self._threads: dict[int, tuple[EnginePlan, threading.Thread]] = {}
        self._restarting: dict[int, tuple[EnginePlan, float]] = {}
        """Engine -> its plan, and when it was lost."""
        self._waiting: list[Member] = []
        self._without_slots: set[int] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def replace(self, lost: Member) -> None:
        """End ``lost`` and start its successor."""
        plan = lost.engine.plan
        with self._lock:
            self._restarting[lost.rank] = plan, time.monotonic()
            if plan.url is not None:
                self._begin(lost, lambda: self._attach_again(lost))
            elif plan.offload and (plan.update_weights or self._trainer_has_devices()):
                self._waiting.append(lost)
                self._begin(lost, lambda: _end(lost))
            else:
                self._begin(lost, lambda: self._restart(lost))

    def waits_for_devices(self, model: str) -> bool:
        """Return True if a lost engine of ``model`` is started only when the engines have the devices again."""
        with self._lock:
            return any(lost.engine.plan.model == model for lost in self._waiting)

    def is_restarting(self, like: EnginePlan) -> bool:
        """Return True if a lost engine of the model and kind of ``like`` is still to be restarted."""
        with self._lock:
            others = [plan for plan, _ in self._restarting.values()]
        return any((plan.model, plan.worker_type) == (like.model, like.worker_type) for plan in others)

    def wait_for_all(self, deadline_s: float) -> None:
        """Before a push: return when no restart of an engine that gets weights is in progress.

        Restarts that take longer continue in the background. Of engines that others started, which may stay away for
        long, one is enough.
        """
        self._join(deadline_s, lambda plan: plan.update_weights and plan.url is None)
        self._start_waiting(lambda plan: plan.update_weights)
        self._join(deadline_s, lambda plan: plan.update_weights and plan.url is None)
        deadline = time.monotonic() + deadline_s
        while self._waits_for_others() and time.monotonic() < deadline:
            if self._stopping.wait(WAIT_POLL_S):
                return

    def start_frozen(self) -> None:
        """The devices are the engines' again: start the lost engines of frozen models that waited for them."""
        self._start_waiting(lambda plan: not plan.update_weights)

    def wait_for_devices(self, deadline_s: float) -> None:
        """The devices become the trainer's: return when no engine is being started or ended on them."""
        self._join(deadline_s, lambda plan: plan.offload)

    def stop(self) -> None:
        """Start nothing more. Engines that are being started are ended when the fleet stops."""
        self._stopping.set()

    def wait_stopped(self) -> None:
        """After the engines were ended: wait a little for the threads that were starting one."""
        self._join(STOP_TIMEOUT_S, lambda plan: True)

    def _begin(self, lost: Member, work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work, name=f"replace-{lost}", daemon=True)
        self._threads[lost.rank] = (lost.engine.plan, thread)
        thread.start()

    def _start_waiting(self, which: Callable[[EnginePlan], bool]) -> None:
        with self._lock:
            due = [lost for lost in self._waiting if which(lost.engine.plan)]
            self._waiting = [lost for lost in self._waiting if lost not in due]
            for lost in due:
                self._begin(lost, lambda lost=lost: self._restart(lost))  # type: ignore[misc]

    def _join(self, deadline_s: float, which: Callable[[EnginePlan], bool]) -> None:
        deadline = time.monotonic() + deadline_s
        with self._lock:
            threads = [(rank, thread) for rank, (plan, thread) in self._threads.items() if which(plan)]
        for rank, thread in threads:
            while thread.is_alive() and rank not in self._without_slots and time.monotonic() < deadline:
                thread.join(min(WAIT_POLL_S, max(0.0, deadline - time.monotonic())))

    def _restart(self, lost: Member) -> None:
        _end(lost)
        plan, reason = lost.engine.plan, ""
        attempt = 0
        while attempt < ATTEMPTS:
            if self._is_others_turn(lost):
                return
            member = Member(self._new_engine(plan))
            self._members.put(member)
            if self._stopping.is_set():
                return
            (logger.debug if lost.rank in self._without_slots else logger.warning)("restarting %s", member)
            try:
                info = member.engine.start()
                self._without_slots.discard(lost.rank)
                if plan.offload and plan.update_weights:
                    member.keep_weights_only(EngineClient.of(info, self._timeout))
            except SlotsLostError as e:
                self._members.change(member, (State.STARTING,), State.DEAD)
                if self._waits_for_slots(lost, e):
                    continue
                return
            except Exception as e:  # noqa: BLE001  (logged, and retried)
                attempt += 1
                self._without_slots.discard(lost.rank)
                self._members.change(member, (State.STARTING,), State.DEAD)
                _end(member)
                reason = one_line_kind(e)
                if self._stopping.is_set():
                    return
                logger.error("restart of %s failed (attempt %d of %d): %s", member, attempt, ATTEMPTS, reason)
                self._stopping.wait(RETRY_DELAY_S)
                continue
            self._members.started(member, info, State.NEW)
            self._finish_restart(member)
            self._on_restart(member)
            return
        is_last = self._finish_restart(lost)
        message = f"{lost} could not be restarted in {ATTEMPTS} attempts. The last error: {reason}"
        self._on_failure(lost, message, is_last=is_last)

    def _waits_for_slots(self, lost: Member, error: SlotsLostError) -> bool:
        """Return, after a pause, whether to try again here: not where the next push does, or the run ends."""
        plan = lost.engine.plan
        if lost.rank not in self._without_slots:
            logger.error("%s. It is started as soon as a node has.", error)
            self._without_slots.add(lost.rank)
        if self._all_have_been_away(plan.model):
            message = f"{error}, for {self._timeout:g} s now (--engine-ready-timeout)"
            self._on_failure(lost, message, is_last=True)
            return False
        if plan.offload:  # it may be the trainer's turn by then
            with self._lock:
                self._waiting.append(lost)
            return False
        return not self._stopping.wait(RETRY_DELAY_S)

    def _attach_again(self, lost: Member) -> None:
        """Wait until the engine that others started answers, and fits, again."""
        _end(lost)
        plan, said = lost.engine.plan, ""
        while not self._stopping.wait(RETRY_DELAY_S):
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
                    self._on_failure(lost, message, is_last=True)
                continue
            self._members.put(member)
            self._members.started(member, info, State.NEW)
            self._finish_restart(member)
            self._on_restart(member)
            return

    def _all_have_been_away(self, model: str) -> bool:
        """Return True if no engine of ``model`` is alive, and none has been for longer than one may take to start."""
        if self._members.of(*LIVING, model=model):
            return False
        with self._lock:
            last = max((at for plan, at in self._restarting.values() if plan.model == model), default=0.0)
        return time.monotonic() - last > self._timeout

    def _waits_for_others(self) -> bool:
        """Return True if none of the engines that get weights is alive, and others have to restart one."""
        with self._lock:
            away = any(plan.update_weights and plan.url is not None for plan, _ in self._restarting.values())
        return away and not any(m.engine.plan.update_weights for m in self._members.of(*LIVING))

    def _is_others_turn(self, lost: Member) -> bool:
        """True if an engine of a frozen model has to wait after all, as the trainer has its devices. Queues it then."""
        plan = lost.engine.plan
        with self._lock:
            waits = plan.offload and not plan.update_weights and self._trainer_has_devices()
            if waits:
                self._waiting.append(lost)
            return waits

    def _finish_restart(self, member: Member) -> bool:
        """Record that a restart has ended, well or not; return whether no other one of its kind is in progress."""
        ended = member.engine.plan
        with self._lock:
            # Unless it died again already, and another thread restarts it.
            if self._threads[member.rank][1] is threading.current_thread():
                self._restarting.pop(member.rank, None)
        return not self.is_restarting(ended)


def _end(member: Member) -> None:
    try:
        member.engine.end()
    except Exception:  # what is left of it ends with the run
        logger.exception("ending %s", member)
