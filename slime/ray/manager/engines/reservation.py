"""Slots of one engine, reserved while the run is in progress."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from slime.arguments.placement import EnginePlan
from slime.ray import cluster
from slime.ray.manager.engines.members import EngineChangeError

RESERVE_TIMEOUT_S = 10.0
"""Slots that are free are given at once: nothing waits for others to be released."""
PROBE_TIMEOUT_S = 60.0
LOOPBACK_ONLY = (
    ". The run began when this was the only node: its servers listen on loopback, where other nodes do not reach them. "
    "To use more nodes, start the run when all are in the cluster, or with a router that runs and that they reach "
    "(--sglang-router-ip)"
)


class _Probe:
    """Runs where the engine is going to, and reports its GPUs there, by their index on the node."""

    def gpus(self) -> list[int]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return sorted(cluster.gpu_index([given], visible) for given in ray.get_gpu_ids())


class Reservation:
    """A placement group with a bundle per node of the engine of ``plan``. Raises EngineChangeError without room for it.

    ``on_this_node``: on the node of this process, where the servers of the run listen on loopback.
    ``slots``: placement group, bundle of every slot, and GPU of every slot on its node.
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
        self.slots = (self._pg, bundles, gpus)

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
