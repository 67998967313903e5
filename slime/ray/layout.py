"""Which slots a run asks for and who gets them. Pure: no Ray."""

from __future__ import annotations

import ipaddress
import socket
from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """``slots`` to reserve; trainers take the first ones, engines those from ``rollout_offset`` on."""

    slots: int
    rollout_offset: int
    trainer_slots: int
    rollout_slots: int


def plan_layout(
    *,
    actor_slots: int,
    rollout_slots: int,
    colocate: bool = False,
    train_only: bool = False,
    rollout_only: bool = False,
    external: bool = False,
) -> Layout:
    """Return the layout of a run: side by side, or on the same slots with ``colocate``; external engines take none."""
    if train_only:
        return Layout(actor_slots, 0, actor_slots, 0)
    if external:
        return Layout(actor_slots, 0 if rollout_only else actor_slots, actor_slots, 0)
    if rollout_only:
        return Layout(rollout_slots, 0, 0, rollout_slots)
    if colocate:
        return Layout(max(actor_slots, rollout_slots), 0, actor_slots, rollout_slots)
    return Layout(actor_slots + rollout_slots, actor_slots, actor_slots, rollout_slots)


def layout_of(args: Namespace) -> Layout:
    """Return the layout that the flags ask for."""
    return plan_layout(
        actor_slots=args.actor_num_nodes * args.actor_num_gpus_per_node,
        rollout_slots=args.rollout_num_gpus or 0,
        colocate=args.colocate,
        train_only=args.debug_train_only,
        rollout_only=args.debug_rollout_only,
        external=args.rollout_external,
    )


@dataclass(frozen=True)
class EnginePlan:
    """One engine: its ``rank`` among all, its first slot among the rollout's, its slots in total and per node."""

    rank: int
    gpu_offset: int
    num_gpus: int
    num_gpus_on_node: int
    nodes: int


def plan_engines(*, rollout_slots: int, slots_per_engine: int, slots_per_node: int) -> list[EnginePlan]:
    """Return the engines that ``rollout_slots`` hold.

    Raises ValueError when the slots are no multiple of an engine's, or an engine of several nodes does not fill them.
    """
    if rollout_slots % slots_per_engine:
        raise ValueError(
            f"--rollout-num-gpus {rollout_slots} is no multiple of --rollout-num-gpus-per-engine {slots_per_engine}: "
            f"{rollout_slots % slots_per_engine} slots would stay idle"
        )
    nodes = max(1, slots_per_engine // slots_per_node)
    if slots_per_engine > slots_per_node and slots_per_engine % slots_per_node:
        raise ValueError(
            f"an engine of --rollout-num-gpus-per-engine {slots_per_engine} slots spans nodes of --num-gpus-per-node "
            f"{slots_per_node}, so it must be a multiple of that"
        )
    return [
        EnginePlan(rank, rank * slots_per_engine, slots_per_engine, min(slots_per_engine, slots_per_node), nodes)
        for rank in range(rollout_slots // slots_per_engine)
    ]


def node_sort_key(address: str) -> tuple[int, ...]:
    """Return a key that orders nodes by IP address number; names are resolved, or ordered by their characters."""
    try:
        return tuple(ipaddress.ip_address(address).packed)
    except ValueError:
        pass
    try:
        return tuple(ipaddress.ip_address(socket.gethostbyname(address)).packed)
    except OSError:
        return tuple(map(ord, address))
