"""All engines of a run and their router: started in parallel, watched, controlled together."""

from __future__ import annotations

import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from slime.arguments.plan.placement import EnginePlan, engines_of
from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.observability.run_dir import log_path
from slime.ray.cluster import on_slot
from slime.ray.engine_actor import EngineActor
from slime.ray.errors import EngineDied, one_line_kind
from slime.ray.rollout_validation import validate_server_group_gpu_indices
from slime.ray.waiting import Peer, wait_all
from slime.servers.auth import ensure_api_key, is_loopback
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from slime.utils.network import get_current_node_ip

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 2.0
POLL_DEADLINE_S = 20.0
STOP_DEADLINE_S = 30.0
CONTROL_TIMEOUT_S = 600.0


class EngineFleet:
    """Engines on ``slots`` (placement group, bundles, GPUs), one router in this process's care.

    ``on_death`` is called, once, from the watching thread with the exception that says which process ended and how.
    """

    def __init__(
        self, args: Namespace, slots: Any, wiring: dict[str, Any], on_death: Callable[[EngineDied], None]
    ) -> None:
        self.args, self._wiring, self._on_death = args, wiring, on_death
        self._pg, self._bundles, self._gpu_ids = slots
        self.plans = engines_of(args)
        self.infos: list[EngineInfo] = []
        self.router: RouterProcess | RunningRouter | None = None
        self._actors: dict[tuple[int, int], Any] = {}
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start engines and router and return when all are ready and registered.

        Sets ``args.sglang_router_ip``, ``sglang_router_port`` and ``sglang_model_routers`` in this process.
        Raises RemoteFailure with the log's last lines when an engine is not ready within ``--engine-ready-timeout``.
        """
        if self.plans:
            self._validate()
        elsewhere = self.args.sglang_router_ip is not None and not is_loopback(self.args.sglang_router_ip)
        loopback = self._spans_one_host() and not elsewhere
        host = "127.0.0.1" if loopback else get_current_node_ip()
        # Before anything copies args: router, engines and clients all take the key from there.
        ensure_api_key(self.args, host)
        self.router = self._router(host)
        self.router.start()
        self._launch(loopback)
        deadline = self.args.engine_ready_timeout
        self.router.wait_ready()
        keys = list(self._actors)
        infos = wait_all(
            [self._actors[key].wait_ready.remote() for key in keys],
            [self._peer(*key) for key in keys],
            "starting the engines",
            deadline + STOP_DEADLINE_S,
        )
        self.infos = [info for (_, node_rank), info in zip(keys, infos, strict=True) if node_rank == 0]
        for info in self.infos:
            self.router.add_engine(info)
        self.args.sglang_router_ip, self.args.sglang_router_port = self.router.host, self.router.port
        self.args.sglang_model_routers = {"default": (self.router.host, self.router.port)}
        self._watcher = threading.Thread(target=self._watch, name="engine-watcher", daemon=True)
        self._watcher.start()
        logger.info("%d engines behind %s: %s", len(self.infos), self.router.url, ", ".join(i.url for i in self.infos))

    def clients(self) -> list[EngineClient]:
        """Return a new client per engine."""
        return [EngineClient(i.url, api_key=i.api_key, timeout=CONTROL_TIMEOUT_S) for i in self.infos]

    def for_all(self, action: Callable[[EngineClient], Any]) -> list[Any]:
        """Do ``action`` on every engine at once; return the results, or raise the first failure."""
        if not self.infos:
            return []
        with ThreadPoolExecutor(len(self.infos)) as pool:
            return list(pool.map(action, self.clients()))

    def stop(self) -> None:
        """End every engine and the router. Processes that do not answer are ended with their actor."""
        self._stopping.set()
        actors = list(self._actors.values())
        if actors:
            ray.wait([a.stop.remote() for a in actors], num_returns=len(actors), timeout=STOP_DEADLINE_S)
            for actor in actors:
                ray.kill(actor)
        if self.router is not None:
            self.router.stop()

    # Inside

    def _router(self, host: str) -> RouterProcess | RunningRouter:
        if self.args.sglang_router_ip is not None:
            return RunningRouter(self.args)
        return RouterProcess(self.args, host, self.args.sglang_router_port, log_path=log_path(self.args, "router"))

    def _validate(self) -> None:
        plan = self.plans[0]
        validate_server_group_gpu_indices(
            worker_type="regular",
            gpu_offset=0,
            num_gpus_per_engine=plan.num_gpus,
            num_gpus_per_engine_on_node=plan.num_gpus_on_node,
            num_engines=len(self.plans) * plan.nodes,
            num_available_gpus=len(self._bundles),
            rollout_num_gpus=self.args.rollout_num_gpus,
            rollout_num_gpus_per_engine=self.args.rollout_num_gpus_per_engine,
        )

    def _spans_one_host(self) -> bool:
        return len({n["NodeID"] for n in ray.nodes() if n["Alive"]}) == 1

    def _launch(self, loopback: bool) -> None:
        for plan in self.plans:
            for node_rank in range(plan.nodes):
                first = plan.gpu_offset + node_rank * plan.num_gpus_on_node
                self._actors[plan.rank, node_rank] = (
                    ray.remote(EngineActor)
                    .options(
                        max_concurrency=4,
                        runtime_env=self._wiring["runtime_env"],
                        scheduling_strategy=on_slot(self._pg, self._bundles[first]),
                        **self._wiring["engine_options"],
                    )
                    .remote(self.args, plan.rank, node_rank)
                )
        keys = list(self._actors)
        plans = {plan.rank: plan for plan in self.plans}
        meeting = {
            plan.rank: ray.get(self._actors[plan.rank, 0].rendezvous.remote(loopback), timeout=POLL_DEADLINE_S * 3)
            for plan in self.plans
            if plan.nodes > 1
        }
        wait_all(
            [self._actors[k].start.remote(loopback, **self._placement(plans[k[0]], k[1], meeting)) for k in keys],
            [self._peer(*key) for key in keys],
            "launching the engines",
            self.args.engine_ready_timeout,
        )

    def _placement(self, plan: EnginePlan, node_rank: int, meeting: dict[int, str]) -> dict[str, Any]:
        first = plan.gpu_offset + node_rank * plan.num_gpus_on_node
        return {
            "dist_init_addr": meeting.get(plan.rank),
            "nnodes": plan.nodes,
            # Without GPUs the slots are a fiction of ours: every engine sees the same cores.
            "base_gpu_id": self._gpu_ids[first] if self.args.device_type == "cuda" else 0,
            "gpu_offset": plan.gpu_offset,
            "num_gpus": plan.num_gpus,
        }

    def _peer(self, rank: int, node_rank: int) -> Peer:
        name = f"engine {rank}" + (f" node {node_rank}" if node_rank else "")
        return Peer(name)

    def _watch(self) -> None:
        """Poll engines and router until one has ended; the engines' actors answer within milliseconds."""
        while not self._stopping.wait(WATCH_INTERVAL_S):
            ended = self._find_ended()
            if ended is not None and not self._stopping.is_set():
                logger.error("%s", ended)
                self._on_death(EngineDied(ended))
                return

    def _find_ended(self) -> str | None:
        if self.router is not None and (ended := self.router.poll()) is not None:
            return ended
        refs = {actor.poll.remote(): key for key, actor in self._actors.items()}
        deadline = time.monotonic() + POLL_DEADLINE_S
        pending = list(refs)
        while pending and time.monotonic() < deadline and not self._stopping.is_set():
            ready, pending = ray.wait(pending, num_returns=1, timeout=1.0)
            for ref in ready:
                try:
                    ended = ray.get(ref)
                except ray.exceptions.RayError as e:
                    ended = (
                        f"{self._peer(*refs[ref]).name}: its actor ended, and the engine with it. {one_line_kind(e)}"
                    )
                if ended is not None:
                    return str(ended)
        if pending and not self._stopping.is_set():
            names = ", ".join(self._peer(*refs[ref]).name for ref in pending)
            logger.warning("%s: the actor has not answered for %.0f s", names, POLL_DEADLINE_S)
        return None
