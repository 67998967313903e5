"""All engines of a run and their routers: started in parallel, watched, controlled together, restarted on failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

import ray

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.ray.manager.engines.engine import RayEngine
from slime.ray.manager.engines.external import ExternalEngine, external_plans
from slime.ray.manager.engines.health import (
    IDLE,
    HealthLimits,
    HealthMonitor,
    Rejections,
    check_alive,
    check_generates,
)
from slime.ray.manager.engines.members import LIVING, MEMORY_TAGS, STAYING, Engine, Member, Members, State
from slime.ray.manager.engines.renewable import check_renewable
from slime.ray.manager.engines.restarts import EngineRestarts
from slime.ray.manager.engines.served_model import RouterEndedError, ServedModel, new_router, served_models
from slime.ray.manager.engines.slots import EngineSlots, Slots
from slime.ray.remote import EngineDied
from slime.servers.auth import ensure_api_key, is_loopback
from slime.servers.engine_client import WeightCheck
from slime.servers.http import EngineTimeoutError, RouterError, ServerError
from slime.servers.http_utils import get_http_client
from slime.servers.types import EngineInfo
from slime.utils import run_key
from slime.utils.network import get_current_node_ip
from slime.utils.run_state import record
from slime.utils.secrets import remember

logger = logging.getLogger(__name__)

TAKING_WEIGHTS = "taking weights"
WATCH_INTERVAL_S = 2.0
DRAIN_INTERVAL_S = 0.5


class Events(Protocol):
    """Receiver of engine failures; called from threads of the fleet."""

    def engines_failed(self, failure: EngineDied) -> None:
        """The run cannot continue: a router has ended for good, or the last engine of a model."""

    def engines_need_weights(self) -> None:
        """No engine serves the trained model any more; restarted ones could, once they have the trainer's weights."""


class EngineFleet:
    """Engines on ``slots``, and a router per model, owned by this process.

    An engine that ends, or stops responding under ``--use-fault-tolerance``, gets no more requests; those it had are
    retried on the others of its model. With the flag it is restarted in the background, and gets requests again once it
    has the trainer's weights: ``recover``, push, ``admit``. One of a frozen model needs none, and gets them at once.
    So does one that hangs in a call, or whose answers are rejected again and again. A router that ends is restarted.
    Engines that others started are attached instead, again when they have been restarted, and outlive the fleet.
    """

    def __init__(
        self,
        args: Args,
        slots: Slots,
        wiring: dict[str, Any],
        events: Events,
        new_engine: Callable[[EnginePlan], Engine] | None = None,
    ) -> None:
        self.args, self._events = args, events
        self.slots = EngineSlots(slots, wiring)
        self.plans = external_plans(args) if args.rollout_external else engines_of(args)
        self.members = Members()
        self.models = served_models(args, self.plans, self.members)
        self._model_of = {plan.rank: model for model in self.models for plan in model.plans}
        self._rejections = Rejections(self.members, self.models, self.mark_dead)
        self._new_engine = new_engine or self._make_engine
        self._offered: list[Member] = []
        self._released: set[str] = set()
        """The kinds of memory that the engines which share devices with the trainer have released."""
        self._given_keys: tuple[str | None, str | None] = (None, None)
        """The key of engines that run already: they do not know one that is generated."""
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._restarts: EngineRestarts | None = None
        self._monitor: HealthMonitor[Member] | None = None

    @property
    def num_new(self) -> int:
        """The number of engines that wait for the trainer's weights."""
        return len(self._updatable(State.NEW))

    def start(self) -> None:
        """Start engines and routers and return when all are ready and registered.

        Sets in this process ``args.sglang_router_ip`` and ``sglang_router_port`` (the first model's),
        ``sglang_model_routers`` (name -> address) and ``sglang_model_engines`` (name -> how many that generate).
        Raises RemoteFailure with the log's last lines when an engine is not ready within ``--engine-ready-timeout``,
        ValueError when pushes of weights would not renew all that an engine generates with.
        """
        self.slots.validate(self.args, [plan for plan in self.plans if plan.url is None])
        elsewhere = self.args.sglang_router_ip is not None and not is_loopback(self.args.sglang_router_ip)
        self.slots.loopback = spans_one_host() and not elsewhere
        host = "127.0.0.1" if self.slots.loopback else get_current_node_ip()
        self._given_keys = self.args.sglang_api_key, self.args.sglang_admin_api_key
        # Before anything copies args: router, engines and clients all take the keys from there.
        ensure_api_key(self.args)
        remember(self.args)
        for model in self.models:
            model.router = self._router(model, host)
            model.router.start()
        for plan in self.plans:
            self.members.put(Member(self._new_engine(plan)))
        start_all(self.members, self.models)
        if not self.args.debug_rollout_only:
            check_renewable(self.args, self._updatable(State.SERVING))
        ip, port = self.models[0].address
        routers = {model.name: model.address for model in self.models}
        record(self.args, sglang_router_ip=ip, sglang_router_port=port, sglang_model_routers=routers)
        self._count_engines()
        if self.args.use_fault_tolerance:
            self._restarts = EngineRestarts(
                self.args,
                self.members,
                self._new_engine,
                self._restarted,
                self._restart_failed,
                lambda: bool(self._released),
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
        for model in self.models:
            run_key.add(model.running_router.url, self.args.sglang_api_key)
            urls = [member.known_info.url for member in model.of(*State)]
            of_model = "" if model.name == "default" else f" of model {model.name}"
            url = model.running_router.url
            logger.info("%d engines%s behind %s: %s", len(urls), of_model, url, ", ".join(urls))

    def check_weights(self, action: WeightCheck) -> list[Any]:
        """Run ``action`` of the weight checker on all engines that serve the trainer's weights."""
        return self._at_once(self._updatable(State.SERVING), lambda member: member.client.weights_checker(action))

    def release_memory(self) -> None:
        """Release the memory of the engines that share devices with the trainer, which takes its turn.

        No engine is started on them until ``resume_memory`` has taken everything back.
        """
        self._released = set(MEMORY_TAGS)
        if self._restarts is not None:
            self._restarts.wait_for_devices(self.args.engine_ready_timeout)
        self._at_once(self._sharing_devices(), Member.release_memory)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take back what ``release_memory`` has released: everything, or only ``tags``."""
        wanted = MEMORY_TAGS if tags is None else tags
        self._released = self._released.difference(wanted)
        self._at_once(self._sharing_devices(), lambda member: member.resume_memory(wanted))
        if self._restarts is not None and not self._released:
            self._restarts.start_frozen()

    def _at_once(self, members: Sequence[Member], action: Callable[[Member], Any]) -> list[Any]:
        """Do ``action`` on ``members`` at once; return the results, or raise the first failure.

        An engine that turns out to have exited or not to respond, be it to this call only, is marked dead instead of
        raising.
        """
        if not members:
            return []
        results, failures = [], []
        with ThreadPoolExecutor(len(members)) as pool:
            for member, call in [(m, pool.submit(action, m)) for m in members]:
                try:
                    results.append(call.result())
                except ServerError as e:
                    failures.append((member, e))
        for member, error in failures:
            if isinstance(error, EngineTimeoutError):
                self.mark_dead(member, member.describe_failure(f"it hangs. {error}"))
        if failures:
            self.mark_unreachable_dead()
        for member, error in failures:
            if member.state is not State.DEAD:
                raise error
        return results

    # Dead engines and their restart

    def mark_dead(self, member: Member, reason: str) -> None:
        """Send ``member`` no more requests, end it, and restart it under ``--use-fault-tolerance``.

        No-op for one that is dead already. Reports the failure, or the need for weights, when its model has no engine
        left.
        """
        if self._stopping.is_set() or not self.members.change(member, LIVING, State.DEAD):
            return
        model = self._model_of[member.rank]
        message = f"{reason}\n{model.recovery_message(member.engine.plan, restarts=self._restarts is not None)}"
        logger.error("%s", message)
        if self._restarts is None and not model.answers(State.SERVING):
            self._events.engines_failed(EngineDied(message))
        model.deregister(member)
        self._forget_keys(member)
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

    def mark_unreachable_dead(self, hanging: Mapping[str, str] | None = None) -> None:
        """Mark every engine dead that has exited or does not respond to repeated requests.

        ``hanging``: engine URL -> the call that it did not answer; it may well answer others.
        """
        self.reap_exited()
        for member in self.members.of(*LIVING):
            if (call := (hanging or {}).get(member.known_info.url)) is not None:
                self.mark_dead(member, member.describe_failure(f"it hangs in a weight sync: {call}"))
        members = self.members.of(*LIVING)
        for member, error in zip(members, _in_parallel(lambda m: check_alive(m.known_info), members), strict=True):
            if error is not None:
                self.mark_dead(member, member.describe_failure(f"it does not respond any more. {error}"))

    def note_rejected(self, router_url: str, engine_url: str | None, wrong: str) -> None:
        """An answer that came through ``router_url`` was not used; an engine that gives several such ends."""
        self._rejections.note(router_url, engine_url, wrong, get_http_client().answers.oldest_version.get(router_url))

    def recover(self) -> int:
        """Before a push of weights: return when the restarts of dead engines have ended.

        Checks nothing from now on until ``admit``. Returns how many engines wait for weights.
        """
        self.pause_checks(TAKING_WEIGHTS)
        if self._restarts is None:
            self.reap_exited()
            return 0
        self.mark_unreachable_dead()
        frozen = [member for member in self._sharing_devices() if not member.engine.plan.update_weights]
        if frozen and not self._released:  # in the middle of a rollout: the trainer needs room to send from
            self._released = set(MEMORY_TAGS) - {"weights"}
            self._at_once(frozen, Member.release_memory)
        self._restarts.wait_for_all(self.args.engine_ready_timeout)
        return self.num_new

    def offer(self) -> list[EngineInfo]:
        """Return the engines that are to get the weights: those that serve, and those that wait for that."""
        self._offered = self._updatable(*LIVING)
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
        """Return the metrics of engine faults: nothing while there was none and none is looked for.

        Of several models each has its own beside those of all.
        """
        several = self.models if len(self.models) > 1 else ()
        rejected = self.members.rejected_of
        rare = {
            "router_restarts": sum(model.router_restarts for model in self.models),
            "rejected_answers": rejected.total(),
            **{f"{model.name}/router_restarts": model.router_restarts for model in several},
            **{f"{model.name}/rejected_answers": rejected[model.name] for model in several},
        }
        faults = {f"rollout/engines/{name}": count for name, count in rare.items() if count}
        if self._restarts is None and not self.members.lost:
            return faults
        counts = _counts("", self.members.of(State.SERVING), self.members.lost, self.members.restarted)
        for model in several:
            lost, restarted = self.members.lost_of[model.name], self.members.restarted_of[model.name]
            counts |= _counts(f"{model.name}/", model.of(State.SERVING), lost, restarted)
        return counts | faults

    def drain(self, deadline_s: float) -> int:
        """Take every engine off its router, and wait until they have answered what they hold.

        Returns how many requests are left, which are some only after ``deadline_s``. No engine is restarted any more.
        """
        self._stop_restarting()
        serving = self.members.of(State.SERVING)
        _in_parallel(lambda member: self._model_of[member.rank].deregister(member), serving)
        return wait_until_idle(serving, time.monotonic() + deadline_s)

    def stop(self) -> None:
        """End every engine and the routers."""
        self._stop_restarting()
        _in_parallel(lambda member: member.engine.end(), self.members.all())
        if self._restarts is not None:
            self._restarts.wait_stopped()
        self._forget_keys(*self.members.all())
        for model in self.models:
            if model.router is not None:
                run_key.forget(model.router.url)
                model.router.stop()

    # Inside

    def _forget_keys(self, *members: Member) -> None:
        for member in members:
            if member.info is not None:
                run_key.forget(member.info.url)

    def _stop_restarting(self) -> None:
        """Processes that end from now on are meant to end."""
        self._stopping.set()
        if self._monitor is not None:
            self._monitor.stop()
        if self._restarts is not None:
            self._restarts.stop()

    def _make_engine(self, plan: EnginePlan) -> Engine:
        if plan.url is not None:
            return ExternalEngine(self.args, plan, *self._given_keys)
        slots = self.slots
        return RayEngine(self.args, plan, slots.of(plan), slots.wiring, loopback=slots.loopback)

    def _router(self, model: ServedModel, host: str) -> RouterProcess | RunningRouter:
        return new_router(self.args, model, host, is_first=model is self.models[0])

    def _staying(self, model: ServedModel) -> list[Member]:
        """The engines of ``model`` that are not about to leave; a lost one that is restarted counts."""
        return model.of(*STAYING) if self._restarts is None else model.of(*STAYING, State.DEAD)

    def _count_engines(self) -> None:
        """Let what limits the requests in flight know; they are counted where responses are generated."""
        engines = {
            model.name: sum(member.engine.plan.worker_type != "prefill" for member in self._staying(model))
            for model in self.models
        }
        record(self.args, sglang_model_engines=engines)

    def _updatable(self, *states: State) -> list[Member]:
        """The engines in ``states`` that get the trainer's weights."""
        return [member for member in self.members.of(*states) if member.engine.plan.update_weights]

    def _sharing_devices(self) -> list[Member]:
        return [member for member in self.members.of(*LIVING) if member.engine.plan.offload]

    def _watch(self) -> None:
        """Poll engines and routers until a router has ended for good."""
        while not self._stopping.wait(WATCH_INTERVAL_S):
            try:
                for model in self.models:
                    self._revive_router(model)
                self.reap_exited()
            except RouterEndedError as e:
                self._router_ended(e)
                return
            except Exception:  # a later poll may succeed
                logger.exception("looking for engines that have ended")

    def _revive_router(self, model: ServedModel) -> None:
        for member, reason in model.revive_router(self._stopping):
            self.mark_dead(member, reason)

    def _router_ended(self, error: RouterEndedError) -> None:
        if not self._stopping.is_set():
            logger.error("%s", error)
            self._events.engines_failed(EngineDied(str(error)))

    def _register(self, member: Member) -> None:
        model = self._model_of[member.rank]
        try:
            self._revive_router(model)
            model.register(member)
        except RouterEndedError as e:
            self._router_ended(e)
        except RouterError as e:
            self.mark_dead(member, member.describe_failure(f"it cannot join the router. {e}"))

    def _restarted(self, member: Member) -> None:
        how = "was restarted" if member.engine.plan.url is None else "answers again"
        logger.warning("%s %s, at %s", member, how, member.known_info.url)
        self._generates(member)

    def _generates(self, member: Member) -> None:
        """Send requests to a started engine that needs no weights; of another one, report it when nothing serves."""
        if self._stopping.is_set():
            return
        if self.args.debug_rollout_only or not member.engine.plan.update_weights:  # it gets no weights
            self._register(member)
        self._notify_if_weights_needed()

    def _notify_if_weights_needed(self) -> None:
        """Send the event that engines need weights, if none serves and one waits for a push, or for the devices."""
        trained = [model for model in self.models if model.update_weights]
        if self._restarts is None or any(model.answers(State.SERVING) for model in trained):
            return
        waits = any(self._restarts.waits_for_devices(model.name) for model in trained)
        if self.num_new or waits:
            self._events.engines_need_weights()

    def _restart_failed(self, lost: Member, reason: str, *, is_last: bool) -> None:
        logger.error("%s", reason)
        model = self._model_of[lost.rank]
        if is_last and not model.answers(State.STARTING, *LIVING):
            of_model = "" if model.name == "default" else f" of model {model.name}"
            what = f"no {lost.engine.plan.kind}engine{of_model} is left: {reason}"
            self._events.engines_failed(EngineDied(what))
        self._notify_if_weights_needed()


def _counts(prefix: str, serving: Sequence[Member], lost: int, restarted: int) -> dict[str, int]:
    found = {"serving": len(serving), "lost": lost, "restarted": restarted}
    return {f"rollout/engines/{prefix}{name}": count for name, count in found.items()}


def _requests_of(member: Member) -> int:
    """Return the number of requests of ``member``: 0 where it has ended, 1 where it runs and does not report it."""
    try:
        return member.client.num_requests()
    except ServerError as e:
        is_there = e.status is not None or isinstance(e, EngineTimeoutError)
        return 1 if is_there and member.engine.poll() is None else 0


def wait_until_idle(members: Sequence[Member], deadline: float) -> int:
    """Return how many requests ``members`` hold: some only when it has become ``deadline``.

    One that does not answer in time may be at work, and counts as one request.
    """
    was_idle = False
    while (left := sum(_in_parallel(_requests_of, members))) or not was_idle:
        if time.monotonic() >= deadline:
            break
        was_idle = not left  # the reply of the last request may still be in transit
        time.sleep(DRAIN_INTERVAL_S)
    return left


def _in_parallel(action: Callable[[Member], Any], members: Sequence[Member]) -> list[Any]:
    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(action, members))


def spans_one_host() -> bool:
    """True when the Ray cluster is one host: servers then listen on loopback."""
    return len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1


def start_all(members: Members, models: Sequence[ServedModel]) -> None:
    """Start every engine and wait for the routers in parallel, then register all engines at their model's.

    The first engine that fails ends the wait for the others, with its failure.
    """
    starting = members.all()
    pool = ThreadPoolExecutor(max(1, len(starting)), thread_name_prefix="start-engine")
    try:
        starts = [pool.submit(member.engine.start) for member in starting]
        for model in models:
            model.running_router.wait_ready()
        for start in wait(starts, return_when=FIRST_EXCEPTION).done:
            start.result()
    finally:
        pool.shutdown(wait=False)
    infos = {member.rank: start.result() for member, start in zip(starting, starts, strict=True)}
    for model in models:
        for member in model.of(*State):
            model.running_router.add_engine(infos[member.rank])
            members.started(member, infos[member.rank], State.SERVING)
