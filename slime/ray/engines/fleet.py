"""All engines of a run and their router: started in parallel, watched, controlled together, restarted on failure."""

from __future__ import annotations

import logging
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

import ray

from slime.arguments.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.observability.run_dir import log_path
from slime.ray.engines.engine import RayEngine
from slime.ray.engines.health import IDLE, HealthLimits, HealthMonitor, check_alive, check_generates
from slime.ray.engines.members import LIVING, Engine, Member, Members, State, recovery_message
from slime.ray.engines.restarts import EngineRestarts
from slime.ray.remote import EngineDied
from slime.servers.auth import ensure_api_key, is_loopback
from slime.servers.engine_client import EngineClient
from slime.servers.http import RouterError, ServerError
from slime.servers.types import EngineInfo
from slime.utils.network import get_current_node_ip

logger = logging.getLogger(__name__)

TAKING_WEIGHTS = "taking weights"
WATCH_INTERVAL_S = 2.0
CONTROL_TIMEOUT_S = 600.0


class Events(Protocol):
    """Receiver of engine failures; called from threads of the fleet."""

    def engines_failed(self, failure: EngineDied) -> None:
        """The run cannot continue: the router has exited, or the last engine."""

    def engines_need_weights(self) -> None:
        """No engine serves any more; restarted ones could, once they have the trainer's weights."""


class EngineFleet:
    """Engines on ``slots`` (placement group, bundles, GPUs), and one router, owned by this process.

    An engine that ends, or stops responding under ``--use-fault-tolerance``, gets no more requests; those it had are
    retried on the others. With the flag it is restarted in the background, and gets requests again once it has the
    trainer's weights: ``recover``, push, ``admit``.
    """

    def __init__(
        self,
        args: Namespace,
        slots: Any,
        wiring: dict[str, Any],
        events: Events,
        new_engine: Callable[[EnginePlan], Engine] | None = None,
    ) -> None:
        self.args, self._slots, self._wiring, self._events = args, slots, wiring, events
        self.plans = engines_of(args)
        self.router: RouterProcess | RunningRouter | None = None
        self.members = Members()
        self._new_engine = new_engine or self._ray_engine
        self._offered: list[Member] = []
        self._loopback = True
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._restarts: EngineRestarts | None = None
        self._monitor: HealthMonitor[Member] | None = None

    @property
    def num_new(self) -> int:
        """How many engines wait for the trainer's weights."""
        return len(self.members.of(State.NEW))

    def start(self) -> None:
        """Start engines and router and return when all are ready and registered.

        Sets ``args.sglang_router_ip``, ``sglang_router_port`` and ``sglang_model_routers`` in this process.
        Raises RemoteFailure with the log's last lines when an engine is not ready within ``--engine-ready-timeout``.
        """
        validate_slots(self.args, self.plans, self._slots)
        elsewhere = self.args.sglang_router_ip is not None and not is_loopback(self.args.sglang_router_ip)
        self._loopback = spans_one_host() and not elsewhere
        host = "127.0.0.1" if self._loopback else get_current_node_ip()
        # Before anything copies args: router, engines and clients all take the key from there.
        ensure_api_key(self.args, host)
        self.router = self._router(host)
        self.router.start()
        for plan in self.plans:
            self.members.put(Member(self._new_engine(plan)))
        start_all(self.members, self.router)
        self.args.sglang_router_ip, self.args.sglang_router_port = self.router.host, self.router.port
        self.args.sglang_model_routers = {"default": (self.router.host, self.router.port)}
        if self.args.use_fault_tolerance:
            self._restarts = EngineRestarts(
                self.args, self.members, self._new_engine, self._restarted, self._restart_failed
            )
            self._monitor = HealthMonitor(
                HealthLimits(
                    interval=self.args.rollout_health_check_interval,
                    failures=self.args.rollout_health_check_failures,
                    first_wait=self.args.rollout_health_check_first_wait,
                    grace=self.args.engine_ready_timeout,
                ),
                lambda: self.members.of(State.SERVING),
                lambda m: check_generates(m.known_info, self.args.rollout_health_check_timeout),
                lambda m, reason: self.mark_dead(m, m.describe_failure(reason)),
            )
        self._watcher = threading.Thread(target=self._watch, name="engine-watcher", daemon=True)
        self._watcher.start()
        urls = [member.known_info.url for member in self.members.all()]
        logger.info("%d engines behind %s: %s", len(urls), self.router.url, ", ".join(urls))

    def for_all(self, action: Callable[[EngineClient], Any], *, states: Sequence[State] = LIVING) -> list[Any]:
        """Do ``action`` on every engine in ``states`` at once; return the results, or raise the first failure.

        An engine that turns out to have exited or not to respond is marked dead instead of raising.
        """
        members = self.members.of(*states)
        if not members:
            return []
        results, failures = [], []
        with ThreadPoolExecutor(len(members)) as pool:
            for member, call in [(m, pool.submit(action, _client(m))) for m in members]:
                try:
                    results.append(call.result())
                except ServerError as e:
                    failures.append((member, e))
        if failures:
            self.mark_unreachable_dead()
        for member, error in failures:
            if member.state is not State.DEAD:
                raise error
        return results

    # Dead engines and their restart

    def mark_dead(self, member: Member, reason: str) -> None:
        """Send ``member`` no more requests, end it, and restart it under ``--use-fault-tolerance``.

        No-op for one that is dead already. Reports the failure, or the need for weights, when no engine is left.
        """
        if self._stopping.is_set() or not self.members.change(member, LIVING, State.DEAD):
            return
        serving = len(self.members.of(State.SERVING))
        message = f"{reason}\n{recovery_message(serving, len(self.plans), restarts=self._restarts is not None)}"
        logger.error("%s", message)
        if self._restarts is None and not serving:
            self._events.engines_failed(EngineDied(message))
        self._deregister(member)
        if self._restarts is not None:
            self._restarts.replace(member)
            self._notify_if_weights_needed()
        else:
            threading.Thread(target=member.engine.end, name=f"end-{member}", daemon=True).start()

    def reap_exited(self) -> None:
        """Poll every engine now; mark those dead whose process has exited."""
        members = self.members.of(*LIVING)
        for member, how in zip(members, _in_parallel(lambda m: m.engine.poll(), members), strict=True):
            if how is not None:
                self.mark_dead(member, how)

    def mark_unreachable_dead(self) -> None:
        """Mark every engine dead that has exited or does not respond to repeated requests."""
        self.reap_exited()
        members = self.members.of(*LIVING)
        for member, error in zip(members, _in_parallel(lambda m: check_alive(m.known_info), members), strict=True):
            if error is not None:
                self.mark_dead(member, member.describe_failure(f"it does not respond any more. {error}"))

    def recover(self) -> int:
        """Before a push of weights: return when the restarts of dead engines have ended.

        Checks nothing from now on until ``admit``. Returns how many engines wait for weights.
        """
        self.pause_checks(TAKING_WEIGHTS)
        if self._restarts is None:
            self.reap_exited()
            return 0
        self.mark_unreachable_dead()
        self._restarts.wait_for_all(self.args.engine_ready_timeout)
        return self.num_new

    def offer(self) -> list[EngineInfo]:
        """Return the engines that are to get the weights: those that serve, and those that wait for that."""
        self._offered = self.members.of(*LIVING)
        return [member.known_info for member in self._offered]

    @property
    def offered(self) -> list[Member]:
        """The engines that ``offer`` returned last."""
        return list(self._offered)

    def admit(self) -> None:
        """After a push to the engines last offered: send requests to those that waited for it, and check again.

        One that was restarted during the push did not get the weights, and waits for the next push.
        """
        for member in self._offered:
            if member.state is State.NEW:
                self._register(member)
        self.resume_checks(TAKING_WEIGHTS)
        self._notify_if_weights_needed()

    def pause_checks(self, why: str = IDLE) -> None:
        """Stop health checks for the reason ``why``."""
        if self._monitor is not None:
            self._monitor.pause(why)

    def resume_checks(self, why: str = IDLE) -> None:
        """Remove the reason ``why``; health checks continue when there is no other."""
        if self._monitor is not None:
            self._monitor.resume(why)

    def counts(self) -> dict[str, int]:
        """Return the metrics of engine faults: nothing while there was none and none is looked for."""
        counts = {
            "rollout/engines/serving": len(self.members.of(State.SERVING)),
            "rollout/engines/lost": self.members.lost,
            "rollout/engines/restarted": self.members.restarted,
        }
        return counts if self._restarts is not None or self.members.lost else {}

    def stop(self) -> None:
        """End every engine and the router."""
        self._stopping.set()
        if self._monitor is not None:
            self._monitor.stop()
        if self._restarts is not None:
            self._restarts.stop()
        _in_parallel(lambda member: member.engine.end(), self.members.all())
        if self._restarts is not None:
            self._restarts.wait_stopped()
        if self.router is not None:
            self.router.stop()

    # Inside

    def _ray_engine(self, plan: EnginePlan) -> RayEngine:
        return RayEngine(self.args, plan, self._slots, self._wiring, loopback=self._loopback)

    def _router(self, host: str) -> RouterProcess | RunningRouter:
        if self.args.sglang_router_ip is not None:
            return RunningRouter(self.args)
        return RouterProcess(self.args, host, self.args.sglang_router_port, log_path=log_path(self.args, "router"))

    @property
    def _running_router(self) -> RouterProcess | RunningRouter:
        assert self.router is not None, "the fleet has not been started"
        return self.router

    def _watch(self) -> None:
        """Poll engines and router until the router has ended."""
        while not self._stopping.wait(WATCH_INTERVAL_S):
            ended = self._running_router.poll()
            if ended is not None and not self._stopping.is_set():
                logger.error("%s", ended)
                self._events.engines_failed(EngineDied(ended))
                return
            try:
                self.reap_exited()
            except Exception:  # a later poll may succeed
                logger.exception("looking for engines that have ended")

    def _register(self, member: Member) -> None:
        try:
            self._running_router.add_engine(member.known_info)
        except RouterError as e:
            self.mark_dead(member, member.describe_failure(f"it cannot join the router. {e}"))
        else:
            self.members.change(member, (State.NEW,), State.SERVING)

    def _deregister(self, member: Member) -> None:
        try:
            self._running_router.remove_engine(member.known_info)
        except RouterError as e:
            logger.warning("%s stays on the router, which will find it dead: %s", member, e)

    def _restarted(self, member: Member) -> None:
        logger.warning("%s was restarted, at %s", member, member.known_info.url)
        if self.args.debug_rollout_only:  # there is no weight push
            self._register(member)
        self._notify_if_weights_needed()

    def _notify_if_weights_needed(self) -> None:
        """When nothing serves and nothing can before a push: one that waits for it, or for the devices."""
        if self._restarts is None or self.members.of(State.SERVING):
            return
        if self.num_new or self._restarts.waits_for_devices:
            self._events.engines_need_weights()

    def _restart_failed(self, reason: str, *, is_last: bool) -> None:
        logger.error("%s", reason)
        if is_last and not self.members.of(*LIVING):
            self._events.engines_failed(EngineDied(f"no engine is left: {reason}"))
        self._notify_if_weights_needed()


def _client(member: Member) -> EngineClient:
    info = member.known_info
    return EngineClient(info.url, api_key=info.api_key, timeout=CONTROL_TIMEOUT_S)


def _in_parallel(action: Callable[[Member], Any], members: Sequence[Member]) -> list[Any]:
    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(action, members))


def spans_one_host() -> bool:
    """True when the Ray cluster is one host: servers then listen on loopback."""
    return len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1


def start_all(members: Members, router: RouterProcess | RunningRouter) -> None:
    """Start every engine and wait for the router in parallel, then register all engines with it.

    The first engine that fails ends the wait for the others, with its failure.
    """
    starting = members.all()
    pool = ThreadPoolExecutor(max(1, len(starting)), thread_name_prefix="start-engine")
    try:
        starts = [pool.submit(member.engine.start) for member in starting]
        router.wait_ready()
        for start in wait(starts, return_when=FIRST_EXCEPTION).done:
            start.result()
    finally:
        pool.shutdown(wait=False)
    for member, start in zip(starting, starts, strict=True):
        router.add_engine(start.result())
        members.started(member, start.result(), State.SERVING)


def validate_slots(args: Namespace, plans: Sequence[EnginePlan], slots: Any) -> None:
    """Raise ValueError unless the engines fit on ``slots`` (placement group, bundles, GPUs)."""
    if not plans:
        return
    plan, (_, bundles, _) = plans[0], slots
    validate_server_group_gpu_indices(
        worker_type="regular",
        gpu_offset=0,
        num_gpus_per_engine=plan.num_gpus,
        num_gpus_per_engine_on_node=plan.num_gpus_on_node,
        num_engines=len(plans) * plan.nodes,
        num_available_gpus=len(bundles),
        rollout_num_gpus=args.rollout_num_gpus,
        rollout_num_gpus_per_engine=args.rollout_num_gpus_per_engine,
    )


def validate_server_group_gpu_indices(
    *,
    worker_type: str,
    gpu_offset: int,
    num_gpus_per_engine: int,
    num_gpus_per_engine_on_node: int,
    num_engines: int,
    num_available_gpus: int,
    rollout_num_gpus: int | None,
    rollout_num_gpus_per_engine: int,
) -> None:
    """Raise ValueError, carrying every input, unless the group's engines fit into the slots that are there.

    ``num_engines`` counts engine processes (one per node of an engine); each takes ``num_gpus_per_engine_on_node``
    slots from ``gpu_offset`` on. A group without engines is accepted.
    """
    if num_engines == 0:
        return
    required = gpu_offset + num_engines * num_gpus_per_engine_on_node
    if gpu_offset >= 0 and num_gpus_per_engine_on_node > 0 and required <= num_available_gpus:
        return
    raise ValueError(
        f"the {worker_type} server group does not fit into the slots of this run: "
        f"worker_type={worker_type}, gpu_offset={gpu_offset}, num_gpus_per_engine={num_gpus_per_engine}, "
        f"num_gpus_per_engine_on_node={num_gpus_per_engine_on_node}, num_engines={num_engines}, "
        f"num_available_gpus={num_available_gpus}, required_gpu_slots={required}, "
        f"len(reordered_gpu_ids)={num_available_gpus}, rollout_num_gpus={rollout_num_gpus}, "
        f"rollout_num_gpus_per_engine={rollout_num_gpus_per_engine}. "
        "Check --rollout-num-gpus, --rollout-num-gpus-per-engine and --num-gpus-per-node."
    )
