"""The engines of a run as its driver, its trainers and commands see them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from slime.arguments.args import Args
from slime.arguments.placement import engine_sizes, models_of
from slime.ray.manager.engines import canary
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.manager.engines.lifecycle import EngineLifecycle
from slime.ray.manager.engines.members import EngineChangeError, State
from slime.ray.remote import EngineDied, EnginesNeedWeights, reports_errors
from slime.servers.engine_client import WeightCheck
from slime.servers.http_utils import get_http_client
from slime.servers.types import EngineInfo
from slime.utils import async_utils

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPT_INTERVAL_S = 0.2


class Lock:
    """An actor that one caller at a time may hold; callers that do not get it poll."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self) -> bool:
        """Take the lock; False when it is taken."""
        free, self._held = not self._held, True
        return free

    def release(self) -> None:
        """Release the lock."""
        self._held = False


class EngineControl:
    """The engines of a run for the driver, the trainers and slime <= 0.3.1; ``fleet`` is None without any.

    The actor that has them sets ``fleet``, starts it and then sets ``ready``. The fleet reports engine failures here.
    ``generating`` is held by the rollout or the evaluation in progress, which ends with the engines.
    """

    def __init__(self, args: Args, generating: threading.Lock) -> None:
        self.args, self._generating = args, generating
        self.fleet: EngineFleet | None = None
        self.ready = threading.Event()
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._weights_needed = threading.Event()
        self._lock: Any = None

    @reports_errors
    def get_updatable_engines(self) -> list[EngineInfo]:
        """Return the engines that follow the trainer's weights, once they are ready."""
        fleet = self.wait_until_ready()
        return [] if fleet is None else fleet.offer()

    @reports_errors
    def get_updatable_engines_and_lock(self) -> tuple[list[EngineInfo], Any, int, list[int], list[int], list[Any]]:
        """Return what a trainer of slime <= 0.3.1 requests before a push.

        That is the engines, a lock (an actor with ``acquire() -> bool`` and ``release()``), how many of the engines
        wait for their first push, and per engine the number of its GPUs, the first of them, and its parallel sizes.
        """
        engines = self.get_updatable_engines()
        if self._lock is None:
            self._lock = ray.remote(Lock).options(num_cpus=0).remote()
        plans = [] if self.fleet is None else [member.engine.plan for member in self.fleet.offered]
        sizes = [engine_sizes(self.args, plan) for plan in plans]
        return (
            engines,
            self._lock,
            0 if self.fleet is None else self.fleet.num_new,
            [engine.num_gpus for engine in engines],
            [engine.gpu_offset for engine in engines],
            [{"tp_size": size.tp, "pp_size": size.pp, "ep_size": size.ep} for size in sizes],
        )

    @reports_errors
    def recover_updatable_engines(self) -> int:
        """Before a push of weights: wait until lost engines have been started again (``--use-fault-tolerance``).

        Returns how many engines wait for weights. They are among the updatable ones and get no requests before
        ``clear_updatable_num_new_engines``; until then nothing checks the engines' health.
        """
        fleet = self.wait_until_ready()
        return 0 if fleet is None else fleet.recover()

    @reports_errors
    def load_weights(self, directory: str, version: int, synchronous_loop: bool) -> None:
        """Let the engines last offered load ``version`` of the weights from its directory."""
        from slime.weight_sync import resolve_pause_mode, steps  # Megatron comes with it

        if self.fleet is not None:
            pause_mode = resolve_pause_mode(self.args, synchronous_loop)
            steps.load_files(self.args, self.fleet.offered, directory, version, pause_mode=pause_mode)

    @reports_errors
    def clear_updatable_num_new_engines(self, version: int | None = None) -> None:
        """After a push of weights: send requests to the engines that were new.

        All engines have ``version`` now: requests from here on must not be answered with an older one.
        """
        if self.fleet is not None:
            self._weights_needed.clear()
            for model in self.fleet.models if version is not None else ():
                if model.update_weights:
                    get_http_client().answers.oldest_version[model.running_router.url] = int(version or 0)
            self.fleet.admit()

    @reports_errors
    def mark_unreachable_engines_dead(self, hanging: Mapping[str, str] | None = None) -> None:
        """After a failed push: continue without the engines that have exited or do not respond.

        ``hanging``: engine URL -> the call of the push that it did not answer; it may well answer others.
        """
        if (fleet := self.wait_until_ready()) is not None:
            fleet.mark_unreachable_dead(hanging)

    def health_monitoring_pause(self) -> None:
        """Stop health checks until ``health_monitoring_resume``, or the next rollout or evaluation."""
        if self.fleet is not None:
            self.fleet.pause_checks()

    def health_monitoring_resume(self) -> None:
        """Check the engines' health from now on, after ``--rollout-health-check-first-wait``."""
        if self.fleet is not None:
            self.fleet.resume_checks()

    # Engines that join and leave (``slime engines``)

    @reports_errors
    def deployment(self) -> dict[str, dict[str, Any]]:
        """Return, by model, its checkpoint, the URL of its router, and its engines with their state."""
        if (fleet := self.wait_until_ready()) is None:
            return {}
        paths = {model.name: model.model_path for model in models_of(self.args) or ()}
        return {
            model.name: {
                "model_path": paths.get(model.name, self.args.hf_checkpoint),
                "router": model.running_router.url,
                "engines": [
                    {
                        "rank": member.rank,
                        "url": None if member.info is None else member.info.url,
                        "worker_type": member.engine.plan.worker_type,
                        "slots": member.engine.plan.num_gpus,
                        "state": member.state.value,
                    }
                    for member in model.of(*State)
                ],
            }
            for model in fleet.models
        }

    @reports_errors
    def add_engines(self, model: str | None = None, count: int = 1, worker_type: str | None = None) -> list[int]:
        """Start more engines of ``model`` in the background; return their numbers. See ``EngineLifecycle.add``."""
        return self._lifecycle().add(model, count, worker_type)

    @reports_errors
    def drain_engines(self, ranks: Sequence[int], timeout_s: float | None = None) -> int:
        """Send no more requests to the engines ``ranks``; return when they hold none, and how many were aborted."""
        return self._lifecycle().take_off(ranks, self.args.drain_timeout if timeout_s is None else timeout_s)

    @reports_errors
    def remove_engines(self, ranks: Sequence[int], timeout_s: float | None = None) -> int:
        """``drain_engines``, and end them."""
        return self._lifecycle().remove(ranks, self.args.drain_timeout if timeout_s is None else timeout_s)

    @reports_errors
    def offload(self) -> None:
        """Release the memory (weights and key-value cache) of the engines that share devices with the trainer."""
        self.health_monitoring_pause()
        if (fleet := self.wait_until_ready()) is not None:
            fleet.release_memory()

    @reports_errors
    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Reallocate the memory that engines have released: everything, or only ``tags``."""
        if (fleet := self.wait_until_ready()) is not None:
            fleet.resume_memory(tags)

    def onload_weights(self) -> None:
        """Reallocate the memory that weights are pushed into."""
        self.onload(["weights"])

    def onload_kv(self) -> None:
        """Reallocate what generation needs besides weights."""
        self.onload(["kv_cache", "cuda_graph"])

    @reports_errors
    def check_weights(self, action: WeightCheck) -> list[Any]:
        """Run ``action`` of the weight checker (snapshot, reset_tensors, compare, checksum) on all engines that serve
        the trainer's weights.
        """
        fleet = self.wait_until_ready()
        return [] if fleet is None else fleet.check_weights(action)

    @reports_errors
    def ask_canary(self) -> dict[str, list[float]]:
        """Return, by engine, the log-probs of a fixed prompt with the trainer's weights; see ``canary.ask``."""
        fleet = self.wait_until_ready()
        return {} if fleet is None else canary.ask(self.args, fleet.models)

    def wait_until_weights_needed(self) -> None:
        """Return when the run is over; raise ``EnginesNeedWeights`` when no engine serves and restarted ones wait for
        weights.
        """
        self._weights_needed.wait()
        if not self._over.is_set():
            raise EnginesNeedWeights("every engine was lost; those that were restarted wait for weights")

    def needs_weights(self) -> bool:
        """True from the moment that ``wait_until_weights_needed`` raises until engines serve again."""
        return self._weights_needed.is_set() and not self._over.is_set()

    def wait_for_failure(self) -> None:
        """Return when the run is over; raise ``EngineDied`` when a router or a model's last engine ends before."""
        self._over.wait()
        if isinstance(self._failure, EngineDied):
            raise self._failure

    # Events of the fleet

    def engines_failed(self, failure: EngineDied) -> None:
        """The run cannot continue: see ``lifecycle.Events``."""
        self._failure = failure
        self.end_waits()
        async_utils.interrupt(failure)
        threading.Thread(target=self._interrupt_until_idle, args=(failure,), name="engine-failure", daemon=True).start()

    def engines_need_weights(self) -> None:
        """No engine serves, and one could: see ``lifecycle.Events``."""
        self._weights_needed.set()

    def end_waits(self) -> None:
        """The run is over: let what waits for engines, their need for weights or their failure return."""
        self._over.set()
        self._weights_needed.set()

    def wait_until_ready(self) -> EngineFleet | None:
        """Return the fleet when it is ready (its start has its own deadline), or raise what went wrong with it."""
        fleet = self.fleet  # another thread sets it: None here is None in what is returned
        if fleet is not None:
            self.ready.wait()
        if self._failure is not None:
            raise self._failure
        return fleet

    # Inside

    def _lifecycle(self) -> EngineLifecycle:
        if (fleet := self.wait_until_ready()) is None:
            raise EngineChangeError("the run has no engines (--debug-train-only)")
        return fleet.lifecycle

    def _interrupt_until_idle(self, failure: EngineDied) -> None:
        """Interrupt what is in progress until it ends: it may have begun to wait after the first interrupt."""
        while not self._generating.acquire(timeout=INTERRUPT_INTERVAL_S):
            async_utils.interrupt(failure)
        self._generating.release()


def forwarded(method: Callable[Concatenate[EngineControl, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return ``method`` as one of an actor that has the engines as ``engines``."""

    @functools.wraps(method)
    def call(actor: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(actor.engines, *args, **kwargs)

    return call
