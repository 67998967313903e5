"""One engine on the cluster: a Ray actor on each of its nodes, which runs an SGLang process and ends with it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.engine import PORT_ATTEMPTS
from slime.ray.actors.engine_actor import EngineActor
from slime.ray.cluster import on_slot
from slime.ray.manager.engines.members import SlotsLostError
from slime.ray.manager.engines.slots import Slots, first_slot, nodes_of_slots
from slime.ray.remote import Peer, RemoteFailure, one_line_kind, wait_all
from slime.servers.types import EngineInfo

logger = logging.getLogger(__name__)

POLL_DEADLINE_S = 20.0
STOP_DEADLINE_S = 30.0
RENDEZVOUS_DEADLINE_S = 60.0
SLOTS_INTERVAL_S = 5.0


class RayEngine:
    """The engine of ``plan`` on ``slots``. It is started once and ended once.

    ``loopback``: all of the run is on one host, and servers listen there only.
    """

    def __init__(
        self,
        args: Args,
        plan: EnginePlan,
        slots: Slots,
        wiring: dict[str, Any],
        *,
        loopback: bool,
    ) -> None:
        self.args, self.plan, self._loopback = args, plan, loopback
        self._pg, self._bundles, self._gpu_ids = slots
        self._wiring = wiring
        self._actors: list[Any] = []
        self._hosts: list[dict[str, Any]] = []
        """Ray's entry of the node of every actor."""
        self._slots_seen = 0.0
        self._ended = False

    def __str__(self) -> str:
        return str(self.plan)

    def start(self) -> EngineInfo:
        """Start the processes; return where the engine is reached, once it generates.

        Raises RemoteFailure with the log's last lines when it is not ready within ``--engine-ready-timeout``, and
        SlotsLostError while the placement group waits for nodes in the place of those that are gone.
        """
        self._hosts = self._nodes_of_slots()
        deadline = self.args.engine_ready_timeout
        self._actors = [self._launch(node_rank) for node_rank in range(self.plan.nodes)]
        if self._ended:
            self.end()
            raise RuntimeError(f"{self} was ended while it was being started")
        attempt = 1
        while True:
            try:
                return self._start_once(deadline)
            except SlotsLostError:
                self._kill(self._actors)  # they wait for slots, and would take what its next start is to have
                raise
            except RemoteFailure as e:  # an engine on one node retries this
                taken = self.plan.nodes > 1 and e.data.get("port_taken")
                if not taken or attempt == PORT_ATTEMPTS or self._ended:
                    raise
                logger.warning("%s: another process took one of its ports; starting all of it again", self)
                stops = [actor.stop.remote() for actor in self._actors]
                ray.wait(stops, num_returns=len(stops), timeout=STOP_DEADLINE_S)
                attempt += 1

    def _start_once(self, deadline: float) -> EngineInfo:
        meeting = None
        if self.plan.nodes > 1:
            meeting = ray.get(self._actors[0].rendezvous.remote(self._loopback), timeout=RENDEZVOUS_DEADLINE_S)
        bootstrap_port = self._common_bootstrap_port()
        peers = [Peer(self._name(node_rank)) for node_rank in range(self.plan.nodes)]
        starts = [
            actor.start.remote(self._loopback, bootstrap_port=bootstrap_port, **self._placement(node_rank, meeting))
            for node_rank, actor in enumerate(self._actors)
        ]
        wait_all(starts, peers, f"launching {self}", deadline, liveness=[self])
        ready = [actor.wait_ready.remote() for actor in self._actors]
        info: EngineInfo = wait_all(ready, peers, f"starting {self}", deadline + STOP_DEADLINE_S, liveness=[self])[0]
        return info

    def check(self, what: str) -> None:
        """Raise SlotsLostError when Ray has lost the node of slots during the wait ``what``: no actor would answer."""
        if time.monotonic() - self._slots_seen > SLOTS_INTERVAL_S:
            self._slots_seen = time.monotonic()
            self._nodes_of_slots()

    def pull_weights(self, directory: str, deadline_s: float) -> str:
        """Copy a version of the weights to every host of the engine; return the path of the copies."""
        peers = [Peer(self._name(node_rank)) for node_rank in range(len(self._actors))]
        copies = [actor.pull_weights.remote(directory) for actor in self._actors]
        return str(wait_all(copies, peers, f"copying {directory} to the host of {self}", deadline_s)[0])

    def poll(self) -> str | None:
        """Return None while the engine runs, else what ended it, with its last log lines.

        Actors answer within milliseconds; one that does not is warned of and taken to run.
        """
        ranks = {actor.poll.remote(): node_rank for node_rank, actor in enumerate(self._actors)}
        pending = list(ranks)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_DEADLINE_S)
            if not ready:
                rank = ranks[pending[0]]
                address = self._hosts[rank]["NodeManagerAddress"]
                logger.warning(
                    "%s: the actor on %s has not answered for %.0f s", self._name(rank), address, POLL_DEADLINE_S
                )
                return None
            try:
                ended = ray.get(ready[0])
            except ray.exceptions.RayError as e:
                ended = self._describe_loss(ranks[ready[0]], e)
            if ended is not None:
                return str(ended)
        return None

    def nodes(self) -> set[str]:
        """Return the Ray nodes of its processes."""
        return {str(host["NodeID"]) for host in self._hosts}

    def _nodes_of_slots(self) -> list[dict[str, Any]]:
        """Return Ray's entry of the node of each of its processes. Raises SlotsLostError."""
        found = nodes_of_slots((self._pg, self._bundles, self._gpu_ids), self.plan)
        if found is None:
            raise SlotsLostError(f"{self}: a node of its slots is gone, and no other has room for them")
        return found

    def _describe_loss(self, node_rank: int, error: Exception) -> str:
        """Return what has ended the actor of ``node_rank``, which failed to answer with ``error``."""
        host = self._hosts[node_rank]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        address = host["NodeManagerAddress"]
        if host["NodeID"] not in alive:
            return f"{self._name(node_rank)}: its node {address} is gone, and the engine with it."
        return f"{self._name(node_rank)}: its actor on {address} ended, and the engine with it. {one_line_kind(error)}"

    def last_lines(self) -> list[str]:
        """Return the end of the log of its first node; nothing when its actor does not answer."""
        try:
            lines: list[str] = ray.get(self._actors[0].last_lines.remote(), timeout=POLL_DEADLINE_S)
        except (ray.exceptions.RayError, IndexError):
            return []
        return lines

    def end(self) -> None:
        """End the engine, in any state. Processes that do not respond are ended with their actor."""
        self._ended = True
        actors, self._actors = self._actors, []
        if actors:
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=STOP_DEADLINE_S)
        self._kill(actors)

    @staticmethod
    def _kill(actors: Sequence[Any]) -> None:
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _launch(self, node_rank: int) -> Any:
        return (
            ray.remote(EngineActor)
            .options(
                max_concurrency=4,
                runtime_env=self._wiring["runtime_env"],
                scheduling_strategy=on_slot(self._pg, self._bundles[first_slot(self.plan, node_rank)]),
                **self._wiring["engine_options"],
            )
            .remote(self.args, self.plan.rank, node_rank)
        )

    def _common_bootstrap_port(self) -> int | None:
        """Return the port where all nodes of a prefill engine register; None where its only node chooses one."""
        if self.plan.worker_type != "prefill" or self.plan.nodes == 1:
            return None
        return int(ray.get(self._actors[0].free_port.remote(), timeout=RENDEZVOUS_DEADLINE_S))

    def _placement(self, node_rank: int, meeting: str | None) -> dict[str, Any]:
        return {
            "dist_init_addr": meeting,
            "nnodes": self.plan.nodes,
            # Without GPUs a slot is only a number: every engine sees the same cores.
            "base_gpu_id": self._gpu_ids[first_slot(self.plan, node_rank)] if self.args.device_type == "cuda" else 0,
            "gpu_offset": self.plan.gpu_offset,
            "num_gpus": self.plan.num_gpus,
            "name": str(self.plan),
            "worker_type": self.plan.worker_type,
            "update_weights": self.plan.update_weights,
            "offload": self.plan.offload,
            "overrides": self.plan.overrides,
        }

    def _name(self, node_rank: int) -> str:
        return str(self.plan) + (f" node {node_rank}" if node_rank else "")
