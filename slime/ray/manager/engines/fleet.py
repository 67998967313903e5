"""All engines of a run and their routers: watched, controlled together, and given weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.ray.cluster import spans_one_host
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
from slime.ray.manager.engines.lifecycle import EngineLifecycle, Events
from slime.ray.manager.engines.members import (
    LIVING,
    MEMORY_TAGS,
    Engine,
    Member,
    Members,
    State,
    in_parallel,
    wait_until_idle,
)
from slime.ray.manager.engines.renewable import check_renewable
from slime.ray.manager.engines.scaling import Scaling
from slime.ray.manager.engines.served_model import RouterEndedError, ServedModel, new_router, served_models
from slime.ray.manager.engines.slots import EngineSlots, Slots
from slime.servers.auth import ensure_api_key, is_loopback
from slime.servers.engine_client import WeightCheck
from slime.servers.http import EngineTimeoutError, ServerError
from slime.servers.http_utils import get_http_client
from slime.servers.types import EngineInfo
from slime.utils import run_key
from slime.utils.network import get_current_node_ip
from slime.utils.run_state import record
from slime.utils.secrets import remember

logger = logging.getLogger(__name__)

TAKING_WEIGHTS = "taking weights"
WATCH_INTERVAL_S = 2.0


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
        self.args = args
        self.slots = EngineSlots(slots, wiring)
        self.plans = external_plans(args) if args.rollout_external else engines_of(args)
        self.members = Members()
        self.models = served_models(args, self.plans, self.members)
        self.lifecycle = EngineLifecycle(
            args, self.members, self.models, self.slots, new_engine or self._make_engine, events
        )
        self.scaling = Scaling(self.lifecycle)
        self.health: HealthMonitor[Member] | None = None
        self._rejections = Rejections(self.members, self.models, self.lifecycle.mark_dead)
        self._given_keys: tuple[str | None, str | None] = (None, None)
        """The key of engines that run already: they do not know one that is generated."""

    @property
    def num_new(self) -> int:
        """The number of engines that wait for the trainer's weights."""
        return len(self.members.updatable(State.NEW))

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
        self.lifecycle.start(self.plans)
        if not self.args.debug_rollout_only:
            check_renewable(self.args, self.members.updatable(State.SERVING))
        ip, port = self.models[0].address
        routers = {model.name: model.address for model in self.models}
        record(self.args, sglang_router_ip=ip, sglang_router_port=port, sglang_model_routers=routers)
        self.lifecycle.count_engines()
        if self.args.use_fault_tolerance:
            self.health = HealthMonitor(
                HealthLimits(
                    interval=self.args.rollout_health_check_interval,
                    failures=self.args.rollout_health_check_failures,
                    first_wait=self.args.rollout_health_check_first_wait,
                    grace=self.args.engine_ready_timeout,
                ),
                lambda: self.members.of(State.SERVING),
                lambda m: check_generates(m.known_info, self.args.rollout_health_check_timeout),
                lambda m, reason: self.lifecycle.mark_dead(m, m.describe_failure(reason)),
            )
        threading.Thread(target=self._watch, name="engine-watcher", daemon=True).start()
        for model in self.models:
            run_key.add(model.running_router.url, self.args.sglang_api_key)
            urls = [member.known_info.url for member in model.of(*State)]
            of_model = "" if model.name == "default" else f" of model {model.name}"
            url = model.running_router.url
            logger.info("%d engines%s behind %s: %s", len(urls), of_model, url, ", ".join(urls))
        self.scaling.start()

    def check_weights(self, action: WeightCheck) -> list[Any]:
        """Run ``action`` of the weight checker on all engines that serve the trainer's weights."""
        return self._at_once(
            self.members.updatable(State.SERVING), lambda member: member.client.weights_checker(action)
        )

    def release_memory(self) -> None:
        """Release the memory of the engines that share devices with the trainer, which takes its turn.

        No engine is started on them until ``resume_memory`` has taken everything back.
        """
        self.lifecycle.released = set(MEMORY_TAGS)
        self.lifecycle.wait_for_devices()
        self._at_once(self._sharing_devices(), Member.release_memory)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take back what ``release_memory`` has released: everything, or only ``tags``."""
        wanted = MEMORY_TAGS if tags is None else tags
        self.lifecycle.released = self.lifecycle.released.difference(wanted)
        self._at_once(self._sharing_devices(), lambda member: member.resume_memory(wanted))
        if not self.lifecycle.released:
            self.lifecycle.start_frozen()

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
                self.lifecycle.mark_dead(member, member.describe_failure(f"it hangs. {error}"))
        if failures:
            self.mark_unreachable_dead()
        for member, error in failures:
            if member.state is not State.DEAD:
                raise error
        return results

    def reap_exited(self) -> None:
        """Poll every engine now; mark those dead whose process has exited."""
        members = self.members.of(*LIVING)
        for member, how in zip(members, in_parallel(lambda m: m.engine.poll(), members), strict=True):
            if how is not None:
                self.lifecycle.mark_dead(member, how)

    def mark_unreachable_dead(self, hanging: Mapping[str, str] | None = None) -> None:
        """Mark every engine dead that has exited or does not respond to repeated requests.

        ``hanging``: engine URL -> the call that it did not answer; it may well answer others.
        """
        self.reap_exited()
        for member in self.members.of(*LIVING):
            if (call := (hanging or {}).get(member.known_info.url)) is not None:
                self.lifecycle.mark_dead(member, member.describe_failure(f"it hangs in a weight sync: {call}"))
        members = self.members.of(*LIVING)
        for member, error in zip(members, in_parallel(lambda m: check_alive(m.known_info), members), strict=True):
            if error is not None:
                self.lifecycle.mark_dead(member, member.describe_failure(f"it does not respond any more. {error}"))

    def note_rejected(self, router_url: str, engine_url: str | None, wrong: str) -> None:
        """An answer that came through ``router_url`` was not used; an engine that gives several such ends."""
        self._rejections.note(router_url, engine_url, wrong, get_http_client().answers.oldest_version.get(router_url))

    def recover(self) -> int:
        """Before a push of weights: return when the restarts of dead engines have ended.

        Checks nothing from now on until ``admit``. Returns how many engines wait for weights.
        """
        self.lifecycle.no_push.clear()
        self.pause_checks(TAKING_WEIGHTS)
        if not self.lifecycle.restarts:
            self.reap_exited()
            return 0
        self.mark_unreachable_dead()
        frozen = [member for member in self._sharing_devices() if not member.engine.plan.update_weights]
        if frozen and not self.lifecycle.released:  # in the middle of a rollout: the trainer needs room to send from
            self.lifecycle.released = set(MEMORY_TAGS) - {"weights"}
            self._at_once(frozen, Member.release_memory)
        self.lifecycle.wait_for_restarts()
        return self.num_new

    def offer(self) -> list[EngineInfo]:
        """Return the engines that are to get the weights: those that serve, and those that wait for that."""
        self.lifecycle.offered = self.members.updatable(*LIVING)
        return [member.known_info for member in self.lifecycle.offered]

    @property
    def offered(self) -> list[Member]:
        """The engines that ``offer`` returned last."""
        return list(self.lifecycle.offered)

    def admit(self) -> None:
        """After a push to the engines last offered: send requests to those that waited for it, and check again.

        One that was restarted during the push did not get the weights, and waits for the next push.
        """
        for member in self.lifecycle.offered:
            if member.state is State.NEW:
                self.lifecycle.register(member)
        self.resume_checks(TAKING_WEIGHTS)
        self.lifecycle.notify_if_weights_needed()
        self.lifecycle.no_push.set()

    def pause_checks(self, why: str = IDLE) -> None:
        """Stop health checks for the reason ``why``."""
        if self.health is not None:
            self.health.pause(why)

    def resume_checks(self, why: str = IDLE) -> None:
        """Remove the reason ``why``; health checks continue when there is no other."""
        if self.health is not None:
            self.health.resume(why)

    def counts(self) -> dict[str, int]:
        """Return the metrics of engine faults, and of engines that have joined or left where any has.

        Nothing while there was no fault and none is looked for. Of several models each has its own beside those of all.
        """
        counts, members = self._faults(), self.members
        if members.added or members.removed:
            serving = len(members.of(State.SERVING))
            changes = {"serving": serving, "added": members.added, "removed": members.removed}
            counts |= {f"rollout/engines/{name}": count for name, count in changes.items()}
        return counts

    def _faults(self) -> dict[str, int]:
        several = self.models if len(self.models) > 1 else ()
        rejected = self.members.rejected_of
        rare = {
            "router_restarts": sum(model.router_restarts for model in self.models),
            "rejected_answers": rejected.total(),
            **{f"{model.name}/router_restarts": model.router_restarts for model in several},
            **{f"{model.name}/rejected_answers": rejected[model.name] for model in several},
        }
        faults = {f"rollout/engines/{name}": count for name, count in rare.items() if count}
        if not self.lifecycle.restarts and not self.members.lost:
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
        in_parallel(lambda member: self.lifecycle.model_of(member).deregister(member), serving)
        return wait_until_idle(serving, time.monotonic() + deadline_s)

    def stop(self) -> None:
        """End every engine and the routers."""
        self._stop_restarting()
        self.lifecycle.end_all()
        for model in self.models:
            if model.router is not None:
                run_key.forget(model.router.url)
                model.router.stop()

    # Inside

    def _stop_restarting(self) -> None:
        """Processes that end from now on are meant to end."""
        self.lifecycle.stopping.set()
        if self.health is not None:
            self.health.stop()

    def _make_engine(self, plan: EnginePlan) -> Engine:
        if plan.url is not None:
            return ExternalEngine(self.args, plan, *self._given_keys)
        slots = self.slots
        return RayEngine(self.args, plan, slots.of(plan), slots.wiring, loopback=slots.loopback)

    def _router(self, model: ServedModel, host: str) -> RouterProcess | RunningRouter:
        return new_router(self.args, model, host, is_first=model is self.models[0])

    def _sharing_devices(self) -> list[Member]:
        return [member for member in self.members.of(*LIVING) if member.engine.plan.offload]

    def _watch(self) -> None:
        """Poll engines and routers until a router has ended for good."""
        while not self.lifecycle.stopping.wait(WATCH_INTERVAL_S):
            try:
                for model in self.models:
                    self.lifecycle.revive_router(model)
                self.reap_exited()
            except RouterEndedError as e:
                self.lifecycle.router_ended(e)
                return
            except Exception:  # a later poll may succeed
                logger.exception("looking for engines that have ended")


def _counts(prefix: str, serving: Sequence[Member], lost: int, restarted: int) -> dict[str, int]:
    found = {"serving": len(serving), "lost": lost, "restarted": restarted}
    return {f"rollout/engines/{prefix}{name}": count for name, count in found.items()}
