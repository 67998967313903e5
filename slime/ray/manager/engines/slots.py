"""The slots of engines: those that a run starts with, and those that are reserved for engines added later."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan
from slime.ray import cluster
from slime.ray.manager.engines.members import EngineChangeError

Slots = tuple[Any, list[int], list[int]]
"""A placement group, the bundle of every slot, and the GPU of every slot on its node."""

RESERVE_TIMEOUT_S = 10.0
"""Slots that are free are given at once: nothing waits for others to be released."""
PROBE_TIMEOUT_S = 60.0
LOOPBACK_ONLY = (
    ". The run began when this was the only node: its servers listen on loopback, where other nodes do not reach them. "
    "To use more nodes, start the run when all are in the cluster, or with a router that runs and that they reach "
    "(--sglang-router-ip)"
)


class EngineSlots:
    """The slots of the engines of a run: ``slots``, and reservations for engines that were added.

    ``loopback``: servers listen on loopback, so that all engines have to be on the node of this process.
    """

    def __init__(self, slots: Slots, wiring: dict[str, Any]) -> None:
        self._slots, self.wiring = slots, wiring
        self.loopback = True
        self._lock = threading.Lock()
        self._vacant: list[EnginePlan] = []
        """Removed engines whose slots, of those that the run started with, are free."""
        self._taken: list[EnginePlan] = []
        """The same of engines whose node was taken away. Ray moves the slots to another node when there is one."""
        self._reservations: dict[int, Reservation] = {}
        """Slots of engines that were added, by rank."""

    def validate(self, args: Args, plans: Sequence[EnginePlan]) -> None:
        """Raise ValueError unless the engines of every group fit on the slots of the run."""
        for _, group in groupby(plans, key=lambda plan: plan.group):
            engines = list(group)
            validate_server_group_gpu_indices(
                worker_type=engines[0].worker_type,
                gpu_offset=engines[0].gpu_offset,
                num_gpus_per_engine=engines[0].num_gpus,
                num_gpus_per_engine_on_node=engines[0].num_gpus_on_node,
                num_engines=len(engines) * engines[0].nodes,
                num_available_gpus=len(self._slots[1]),
                rollout_num_gpus=args.rollout_num_gpus,
                rollout_num_gpus_per_engine=args.rollout_num_gpus_per_engine,
            )

    def of(self, plan: EnginePlan) -> Slots:
        """Return where the slots of ``plan`` are."""
        reservation = self._reservations.get(plan.rank)
        return self._slots if reservation is None else reservation.slots

    def place(self, like: EnginePlan, rank: int) -> EnginePlan:
        """Return the plan of engine ``rank``, like ``like``, on slots that one has left, or on new ones.

        Raises EngineChangeError where there are none.
        """
        with self._lock:
            back = [plan for plan in self._taken if slots_stay(self._slots, plan)]
            self._taken = [plan for plan in self._taken if plan not in back]
            self._vacant += back
            for plan in self._vacant:
                if plan.group == like.group:
                    self._vacant.remove(plan)
                    return replace(plan, rank=rank)
        plan = replace(like, rank=rank, gpu_offset=0, offload=False)  # the first slot of the new reservation
        self._reservations[rank] = Reservation(plan, self.wiring, on_this_node=self.loopback)
        return plan

    def free(self, plan: EnginePlan, *, is_lost: bool = False) -> None:
        """Count the slots of ``plan`` as free; ``is_lost``: only when Ray has moved them to another node."""
        reservation = self._reservations.pop(plan.rank, None)
        if reservation is not None:
            reservation.release()
        elif plan.url is None:
            with self._lock:
                (self._taken if is_lost else self._vacant).append(plan)


class _Probe:
    """Runs where the engine is going to, and reports its GPUs there, by their index on the node."""

    def gpus(self) -> list[int]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return sorted(cluster.gpu_index([given], visible) for given in ray.get_gpu_ids())


class Reservation:
    """A placement group with a bundle per node of the engine of ``plan``. Raises EngineChangeError without room for it.

    ``on_this_node``: on the node of this process, where the servers of the run listen on loopback.
    """

    def __init__(self, plan: EnginePlan, wiring: dict[str, Any], *, on_this_node: bool) -> None:
        bundle = {name: amount * plan.num_gpus_on_node for name, amount in wiring["slot"].items()}
        pinned: dict[str, float] = {}
        if on_this_node:
            pinned[cluster.node_resource(ray.get_runtime_context().get_node_id())] = cluster.NODE_SHARE
        self._pg = placement_group(
            [bundle | pinned] * plan.nodes, strategy="STRICT_SPREAD" if plan.nodes > 1 else "PACK"
        )
        try:
            if not self._pg.wait(timeout_seconds=RESERVE_TIMEOUT_S):
                wanted = f"{plan.nodes} x [{cluster.describe_resources(bundle)}]"
                free = cluster.describe_resources(ray.available_resources())
                where = "this node of the Ray cluster" if on_this_node else "the Ray cluster"
                raise EngineChangeError(
                    f"{where} has no room for {plan}: it needs {wanted}, and {free} are free in the cluster"
                    f"{LOOPBACK_ONLY if on_this_node else ''}"
                )
            gpus = [0] * plan.num_gpus
            if "GPU" in bundle:
                gpus = self._probe(plan, wiring, bundle["GPU"])
        except BaseException:
            self.release()
            raise
        bundles = [node for node in range(plan.nodes) for _ in range(plan.num_gpus_on_node)]
        self.slots: Slots = (self._pg, bundles, gpus)

    def _probe(self, plan: EnginePlan, wiring: dict[str, Any], gpus_per_node: float) -> list[int]:
        probes: list[Any] = [
            ray.remote(_Probe)
            .options(
                num_cpus=0,
                num_gpus=gpus_per_node,
                runtime_env=wiring["runtime_env"],
                scheduling_strategy=cluster.on_slot(self._pg, node),
            )
            .remote()
            for node in range(plan.nodes)
        ]
        try:
            found = ray.get([probe.gpus.remote() for probe in probes], timeout=PROBE_TIMEOUT_S)
        finally:
            for probe in probes:
                ray.kill(probe)
        for gpus in found:
            if gpus != list(range(gpus[0], gpus[0] + len(gpus))):
                raise EngineChangeError(
                    f"{plan} would get GPUs {', '.join(map(str, gpus))} of a node, but those of an engine process must "
                    "follow each other: others have those between"
                )
        return [gpu for gpus in found for gpu in gpus]

    def release(self) -> None:
        """Give the slots back to the cluster."""
        remove_placement_group(self._pg)


def first_slot(plan: EnginePlan, node_rank: int) -> int:
    """Return the first slot of one process of the engine of ``plan``."""
    return plan.gpu_offset + node_rank * plan.num_gpus_on_node


def nodes_of_slots(slots: Slots, plan: EnginePlan) -> list[dict[str, Any]] | None:
    """Return Ray's entry of the node of each process of ``plan``; None while one is gone, and no other has room."""
    pg, bundles, _ = slots
    node_of = placement_group_table(pg)["bundles_to_node_id"]
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    found = [alive.get(node_of.get(bundles[first_slot(plan, rank)])) for rank in range(plan.nodes)]
    return [node for node in found if node is not None] if None not in found else None


def slots_stay(slots: Slots, plan: EnginePlan) -> bool:
    """Return True if the slots of ``plan`` are on nodes that are alive, and that Ray is not about to take away."""
    nodes = nodes_of_slots(slots, plan)
    leaving = ray._private.state.state.get_draining_nodes()
    return nodes is not None and all(node["NodeID"] not in leaving for node in nodes)


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
    """Raise ValueError, carrying every input, unless the group's engines fit into the existing slots.

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
