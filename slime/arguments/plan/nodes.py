"""Which node holds which slot, as far as that can be said before there is a cluster."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from slime.arguments.plan.placement import EnginePlan, Layout


@dataclass(frozen=True)
class Node:
    """``slots`` of the run on a node that has ``capacity`` of them."""

    index: int
    slots: range
    capacity: int


def pack(layout: Layout, *, trainer_slots_per_node: int, slots_per_node: int) -> list[Node]:
    """Return the nodes that hold the slots of ``layout``, filled one after the other.

    Ray packs slots onto as few nodes as it can, and slots are numbered by node. A node is taken to have
    ``slots_per_node`` of them, or ``trainer_slots_per_node`` where more than that are asked for to train on.
    """
    nodes: list[Node] = []
    first = 0
    while first < layout.slots:
        trains = first < layout.trainer_slots
        capacity = max(slots_per_node, trainer_slots_per_node if trains else 0)
        nodes.append(Node(len(nodes), range(first, min(first + capacity, layout.slots)), capacity))
        first += capacity
    return nodes


def nodes_of(args: Namespace, layout: Layout) -> list[Node]:
    """Return the nodes of a run."""
    return pack(layout, trainer_slots_per_node=args.actor_num_gpus_per_node, slots_per_node=args.num_gpus_per_node)


def node_of_slot(nodes: Iterable[Node]) -> list[int]:
    """Return the node of every slot."""
    return [node.index for node in nodes for _ in node.slots]


def torn_engines(engines: Iterable[EnginePlan], node_of_slot: Sequence[Hashable], offset: int) -> list[EnginePlan]:
    """Return the engines that cannot work: a process of theirs would need slots of two nodes.

    ``offset`` is the first slot of the rollout.
    """
    return [
        engine
        for engine in engines
        if any(len({node_of_slot[offset + slot] for slot in part}) > 1 for part in engine.parts())
    ]
