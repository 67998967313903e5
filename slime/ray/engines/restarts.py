"""Dead engines are restarted in the background."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.arguments.placement import EnginePlan
from slime.ray.engines.members import Engine, Member, Members, State
from slime.ray.remote import one_line_kind
from slime.servers.engine_client import EngineClient

logger = logging.getLogger(__name__)

ATTEMPTS = 3
RETRY_DELAY_S = 5.0
STOP_TIMEOUT_S = 5.0


class EngineRestarts:
    """One thread per engine that is being replaced.

    Where engines and trainer take turns on the devices (``--offload-rollout``) an engine is started only when they are
    the engines': in ``wait_for_all``; it then holds memory for weights alone, as the others do before a push.
    ``on_restart(member)`` is called when an engine generates again, ``on_failure(reason, is_last=...)`` when it does
    not after all attempts; ``is_last`` when no other restart is in progress either.
    """

    def __init__(
        self,
        args: Namespace,
        members: Members,
        new_engine: Callable[[EnginePlan], Engine],
        on_restart: Callable[[Member], None],
        on_failure: Callable[..., None],
    ) -> None:
        self.waits_for_devices = bool(args.offload_rollout and not args.debug_rollout_only)
        self._timeout = float(args.engine_ready_timeout)
        self._members, self._new_engine = members, new_engine
        self._on_restart, self._on_failure = on_restart, on_failure
        self._threads: dict[int, threading.Thread] = {}
        self._restarting: set[int] = set()
        self._waiting: list[Member] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def replace(self, lost: Member) -> None:
        """End ``lost`` and start its successor."""
        with self._lock:
            self._restarting.add(lost.rank)
            if self.waits_for_devices:
                self._waiting.append(lost)
                self._begin(lost, lambda: _end(lost))
            else:
                self._begin(lost, lambda: self._restart(lost))

    def wait_for_all(self, deadline_s: float) -> None:
        """Return when no restart is in progress; restarts that take longer continue in the background."""
        self._join(deadline_s)
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for lost in waiting:
                self._begin(lost, lambda lost=lost: self._restart(lost))  # type: ignore[misc]
        self._join(deadline_s)

    def stop(self) -> None:
        """Start nothing more. Engines that are being started are ended when the fleet stops."""
        self._stopping.set()

    def wait_stopped(self) -> None:
        """After the engines were ended: wait a little for the threads that were starting one."""
        self._join(STOP_TIMEOUT_S)

    def _begin(self, lost: Member, work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work, name=f"replace-{lost}", daemon=True)
        self._threads[lost.rank] = thread
        thread.start()

    def _join(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _restart(self, lost: Member) -> None:
        _end(lost)
        reason = ""
        for attempt in range(1, ATTEMPTS + 1):
            member = Member(self._new_engine(lost.engine.plan))
            self._members.put(member)
            if self._stopping.is_set():
                return
            logger.warning("restarting %s", member)
            try:
                info = member.engine.start()
                if self.waits_for_devices:  # hold memory for weights alone
                    client = EngineClient(info.url, api_key=info.api_key, timeout=self._timeout)
                    client.release_memory()
                    client.resume_memory(["weights"])
            except Exception as e:  # noqa: BLE001  (logged, and retried)
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
        self._on_failure(message, is_last=is_last)

    def _finish_restart(self, member: Member) -> bool:
        """Record that a restart has ended, well or not; return whether no other one is in progress."""
        with self._lock:
            # Unless it died again already, and another thread restarts it.
            if self._threads[member.rank] is threading.current_thread():
                self._restarting.discard(member.rank)
            return not self._restarting


def _end(member: Member) -> None:
    try:
        member.engine.end()
    except Exception:  # what is left of it ends with the run
        logger.exception("ending %s", member)
