"""Checks of a server group against the slots that were placed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.arguments.plan.placement import EnginePlan


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
