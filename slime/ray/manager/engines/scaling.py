"""Requests for engines to join and leave beside commands: Ray's, before it removes a node, and a user function's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set

import ray

from slime.ray.manager.engines.engine import RayEngine
from slime.ray.manager.engines.lifecycle import EngineLifecycle
from slime.ray.manager.engines.members import LIVING, EngineChangeError, State
from slime.rollout.hooks.hook import Hook, find_hook
from slime.servers.http import ServerError
from slime.servers.loads import num_requests_from_load, num_waiting_from_load

logger = logging.getLogger(__name__)

NOTICE_INTERVAL_S = 2.0
LOAD_TIMEOUT_S = 5.0


class Scaling:
    """A thread that removes engines from nodes that Ray drains, and calls ``--custom-engine-scaling-path``."""

    def __init__(self, lifecycle: EngineLifecycle) -> None:
        self._lifecycle, self._stopping = lifecycle, lifecycle.stopping
        self._hook: Hook | None = find_hook(lifecycle.args, "custom_engine_scaling_path")
        self._leaving: set[int] = set()
        self._said: set[str] = set()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="engine-scaling", daemon=True).start()

    def _run(self) -> None:
        interval = float(self._lifecycle.args.engine_scaling_interval)
        due = time.monotonic() + interval
        while not self._stopping.wait(min(NOTICE_INTERVAL_S, interval)):
            self._attempt(self.heed_notices)
            if self._hook is not None and time.monotonic() >= due:
                self._attempt(self.scale)
                due = time.monotonic() + interval

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except EngineChangeError as e:
            self._say(str(e))
        except Exception as e:
            if self._say(f"{type(e).__name__}: {e}"):
                logger.exception("changing the number of engines")

    def _say(self, sentence: str) -> bool:
        """Warn, once, of what cannot be done; return whether it is the first time."""
        is_new = sentence not in self._said and not self._stopping.is_set()
        if is_new:
            logger.warning("%s", sentence)
        self._said.add(sentence)
        return is_new

    def heed_notices(self) -> None:
        """Remove the engines on nodes that are about to be taken away (preempted, scaled down)."""
        # Node -> when, in milliseconds; 0: not known.
        nodes: Mapping[str, int] = ray._private.state.state.get_draining_nodes() if ray.is_initialized() else {}
        if not nodes:
            return
        ranks = [rank for rank in self.on_nodes(nodes.keys()) if rank not in self._leaving]
        if not ranks:
            return
        last = min((at for at in nodes.values() if at), default=0)
        drain_s = float(self._lifecycle.args.drain_timeout)
        if last:
            drain_s = min(drain_s, max(0.0, last / 1000 - time.time()) / 2)  # what is left is for ending them
        self._leaving.update(ranks)
        logger.warning("Ray takes nodes away: engines %s leave within %.0f s", ", ".join(map(str, ranks)), drain_s)
        for rank in ranks:
            threading.Thread(target=self._attempt, args=(lambda rank=rank: self._leave(rank, drain_s),)).start()

    def on_nodes(self, nodes: Set[str]) -> list[int]:
        """Return the engines that have a process on one of ``nodes``, and that slime started."""
        found = []
        for member in self._lifecycle.members.of(*LIVING):
            engine = member.engine
            if isinstance(engine, RayEngine) and not nodes.isdisjoint(engine.nodes()):
                found.append(member.rank)
        return found

    def _leave(self, rank: int, drain_s: float) -> None:
        try:
            self._lifecycle.remove([rank], drain_s, is_forced=True, are_lost=True)
        finally:
            self._leaving.discard(rank)

    def scale(self) -> None:
        """Ask the hook how many engines each model is to have, and start or remove as many."""
        assert self._hook is not None
        args = self._lifecycle.args
        wanted = self._hook(args, {model.name: self._state_of(model.name) for model in self._lifecycle.models})
        if wanted is None:
            return
        if not isinstance(wanted, Mapping) or not all(isinstance(count, int) for count in wanted.values()):
            raise self._hook.returned(wanted, "None, or a dict {model: number of engines}")
        for name, count in wanted.items():
            there = self._lifecycle.staying(name)
            most = args.rollout_max_engines
            more = max(args.rollout_min_engines, count if most is None else min(count, most)) - len(there)
            if more > 0:
                logger.warning("%s: %d more engines of model %s", self._hook.flag, more, name)
                self._lifecycle.add(name, more)
            elif more < 0:
                idle_first = sorted(there, key=lambda member: (member.state is State.SERVING, -member.rank))
                leaving = [member.rank for member in idle_first if member.state in LIVING][:-more]
                if leaving:  # those that are being started can be removed later
                    logger.warning("%s: model %s without engines %s", self._hook.flag, name, leaving)
                    self._lifecycle.remove(leaving, float(args.drain_timeout))

    def _state_of(self, model: str) -> dict[str, int | None]:
        members = self._lifecycle.staying(model)
        running = waiting = 0
        for member in members:
            if member.state is State.SERVING:
                try:
                    load = member.client.loads(LOAD_TIMEOUT_S)
                except ServerError:
                    continue
                waiting_here = num_waiting_from_load(load)
                waiting += waiting_here
                running += num_requests_from_load(load) - waiting_here
        return {
            "engines": len(members),
            "serving": sum(member.state is State.SERVING for member in members),
            "running": running,
            "waiting": waiting,
            "min": self._lifecycle.args.rollout_min_engines,
            "max": self._lifecycle.args.rollout_max_engines,
        }
