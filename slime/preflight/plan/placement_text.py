"""The placement as text: a line per process where there are few, ranges where there are many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby

from slime.arguments.args import Args
from slime.arguments.placement import EnginePlan, EngineSizes
from slime.preflight.plan.format import bullets, count, span, table, wrapped
from slime.preflight.plan.placement import DENSE, NAMES, Kind, Placement, TrainerRanks

FEW_RANKS, FEW_ENGINES = 16, 8
"""So many are listed one by one."""


def placement_lines(placement: Placement, args: Args) -> list[str]:
    """The section of the page."""
    lines = wrapped(_summary(placement), "  ", "  ")
    if placement.nodes:
        lines += ["", *_node_table(placement)]
    lines += ["", *_process_table(placement, args)]
    if placement.trainer is not None and placement.trainer.world_size > 1:
        lines += ["", *_rank_lines(placement, placement.trainer)]
    if 1 < len(placement.engines) <= FEW_ENGINES:
        lines += ["", *_engine_table(placement)]
    notes = _notes(placement, args)
    return lines + (["", *bullets(notes)] if notes else [])


SENTENCES: dict[Kind, str] = {
    "side by side": "{trainer} to train and {rollout} to generate, side by side",
    "colocated": "{trainer} to train and {rollout} to generate, on the same slots",
    "training only": "{trainer} to train",
    "generation only": "{rollout} to generate",
    "external engines": "{trainer} to train; the engines run elsewhere already",
    "no slots": "no slot: router only",
}


def _sentence(placement: Placement) -> str:
    trainer, rollout = (count(n, "slot") for n in (placement.layout.trainer_slots, placement.layout.rollout_slots))
    if placement.external and placement.trainer is None:
        return f"{trainer} reserved, where nothing runs; the engines run elsewhere already"
    if placement.kind in ("side by side", "colocated") and placement.layout.rollout_slots == 0:
        return f"{trainer} to train, none to generate (--rollout-num-gpus 0)"
    return SENTENCES[placement.kind].format(trainer=trainer, rollout=rollout)


def _summary(placement: Placement) -> str:
    layout, sentence = placement.layout, _sentence(placement)
    if not placement.nodes:
        return f"{sentence}."
    capacities = sorted({node.capacity for node in placement.nodes})
    size = " or ".join(map(str, capacities))
    where = count(len(placement.nodes), "node")
    total = count(layout.slots, "slot")
    return (
        f"{total} on {where} of {size} slots: {sentence}. A slot is a GPU; on a machine without GPUs it is a process, "
        "and one node has them all."
    )


def _node_table(placement: Placement) -> list[str]:
    """Nodes with the same load are one row."""
    shared = placement.critic
    head = ["nodes", "slots", "trainer ranks" + (" (actor and critic)" if shared else ""), "engines", "free"]
    rows = []
    loads = [_load(placement, node.slots) for node in placement.nodes]
    for _, group in groupby(placement.nodes, key=lambda node: (len(node.slots), node.capacity, *loads[node.index][2:])):
        nodes = list(group)
        slots = range(nodes[0].slots.start, nodes[-1].slots.stop)
        ranks, engines, *_ = _load(placement, slots)
        free = nodes[0].capacity - len(nodes[0].slots)
        several = " each" if len(nodes) > 1 else ""
        rows.append(
            (
                span(range(nodes[0].index, nodes[-1].index + 1)),
                span(slots),
                _per_node(ranks, len(nodes)),
                _engines_here(engines) if engines or ranks else "kept free",
                f"{free}{several}" if free else "-",
            )
        )
    kept = [i for i, name in enumerate(head) if any(row[i] != "-" for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _load(placement: Placement, slots: range) -> tuple[range, list[EnginePlan], int, tuple[tuple[int, str], ...]]:
    """Ranks and engines on ``slots``, their number of ranks, and the engines' shape there."""
    world = placement.trainer.world_size if placement.trainer else 0
    ranks = range(min(slots.start, world), min(slots.stop, world))
    engines = [
        engine
        for engine in placement.engines
        if placement.engine_slots(engine).start < slots.stop and slots.start < placement.engine_slots(engine).stop
    ]
    # Engines that span nodes make one row of all their nodes.
    shape = tuple((0 if engine.nodes > 1 else engine.num_gpus, engine.worker_type) for engine in engines)
    return ranks, engines, len(ranks), shape


def _per_node(ranks: range, nodes: int) -> str:
    if not ranks:
        return "-"
    return span(ranks) + (f" ({len(ranks) // nodes} per node)" if nodes > 1 else "")


def _engines_here(engines: list[EnginePlan]) -> str:
    if not engines:
        return "-"
    kinds = []
    for (model, kind), group in groupby(engines, key=lambda engine: (engine.model, engine.worker_type)):
        named = list(group)
        name = "" if kind == "regular" else f"{kind} "
        of = "" if model == "default" else f" of {model}"
        kinds.append(f"{name}{span([engine.rank for engine in named])}{of}")
    return "; ".join(kinds)


def _process_table(placement: Placement, args: Args) -> list[str]:
    driver, manager = ("driver", "1", "where it is started", "-"), ("1", "chosen by Ray", "-")
    rows: list[tuple[str, str, str, str, str]] = [
        (*driver, "shows the engines" if args.serve_only else "the loop"),
        ("serving manager", *manager, "engines, routers")
        if args.serve_only
        else ("rollout manager", *manager, "prompts, rewards, batches"),
    ]
    for router in placement.routers:
        name = "router" if router.model == "default" else f"router of {router.model}"
        if router.address is not None:
            rows.append((name, "-", router.address, "-", "runs already (--sglang-router-ip, --sglang-router-port)"))
        else:
            port = args.sglang_router_port if router is placement.routers[0] else None
            how = f"port {port}, address chosen at start" if port else "address and port chosen at start"
            rows.append((name, "1", "beside the manager", "-", how))
    if placement.trainer is not None:
        rows += _trainer_rows(placement, placement.trainer)
    rows += _engine_rows(placement)
    for address in placement.external:
        rows.append(("engine", "-", address, "-", "runs already; its size is asked for at start"))
    return table(("process", "count", "where", "slots", "what"), rows)


def _trainer_rows(placement: Placement, ranks: TrainerRanks) -> list[tuple[str, str, str, str, str]]:
    slots = range(ranks.world_size)
    where = f"{_plural('node', placement.nodes_with(slots))}"
    row = ("trainer", f"{ranks.world_size:,}", where, span(slots), _sizes(ranks))
    if not placement.critic:
        return [row]
    return [row, ("critic trainer", row[1], where, row[3], "the same slots and sizes")]


def _engine_rows(placement: Placement) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for _, group in groupby(placement.engines, key=lambda engine: engine.group):
        engines = list(group)
        first = engines[0]
        name = "engine" if first.worker_type == "regular" else f"{first.worker_type} engine"
        slots = range(placement.engine_slots(first).start, placement.engine_slots(engines[-1]).stop)
        what = f"{count(first.num_gpus, 'slot')}{' each' if len(engines) > 1 else ''}"
        what += f": {_engine_sizes(placement.engine_sizes[first.rank])}"
        if first.nodes > 1:
            what += f"; over {first.nodes} nodes"
        if first.model != "default":
            what += f"; model {first.model}"
        rows.append((name, f"{len(engines):,}", _plural("node", placement.nodes_with(slots)), span(slots), what))
    return rows


def _sizes(ranks: TrainerRanks) -> str:
    axes = ranks.axes()
    if not axes:
        return "the whole model"
    dense = " x ".join(f"{NAMES[axis]} {ranks.size(axis)}" for axis in axes if axis in DENSE)
    experts = " x ".join(f"{NAMES[axis]} {ranks.size(axis)}" for axis in axes if axis not in DENSE)
    return "parallel: " + "; ".join(text for text in (dense, experts) if text)


def _engine_sizes(sizes: EngineSizes) -> str:
    parts = [f"tensor {sizes.tp}"]
    parts += [
        f"{name} {size}"
        for name, size in (("pipeline", sizes.pp), ("attention data", sizes.dp), ("expert", sizes.ep))
        if size > 1
    ]
    return ", ".join(parts)


def _rank_lines(placement: Placement, ranks: TrainerRanks) -> list[str]:
    lines = ["  How trainer ranks are grouped, neighbors first:"]
    node = [index for n in placement.nodes for index in [n.index] * len(n.slots)]
    rows = []
    for axis in ranks.axes():
        groups = {ranks.group(rank, axis).start: ranks.group(rank, axis) for rank in range(ranks.world_size)}
        reach = max(len({node[rank] for rank in group}) for group in groups.values())
        rows.append(
            (
                NAMES[axis],
                ranks.size(axis),
                len(groups),
                span(ranks.group(0, axis)),
                "one node" if reach == 1 else f"{reach} nodes",
            )
        )
    lines += table(("parallel", "size", "groups", "ranks of the first group", "a group is within"), rows)
    if ranks.world_size <= FEW_RANKS:
        several_axes = len(ranks.axes()) > 1
        return lines + (["", *_rank_table(placement, ranks)] if several_axes else [])
    in_blocks = ranks.pp > 1 and not ranks.pipeline_before_data
    return lines + (["", *_stage_table(placement, ranks)] if in_blocks else [])


def _rank_table(placement: Placement, ranks: TrainerRanks) -> list[str]:
    axes = ranks.axes()
    rows = []
    for rank in range(ranks.world_size):
        node = placement.nodes_with(range(rank, rank + 1)).start
        rows.append([rank, node, rank, *(ranks.coordinate(rank, axis) for axis in axes)])
    return table(["rank", "node", "slot", *(NAMES[axis] for axis in axes)], rows)


def _stage_table(placement: Placement, ranks: TrainerRanks) -> list[str]:
    size = ranks.world_size // ranks.pp
    rows = []
    for stage in range(ranks.pp):
        members = range(stage * size, (stage + 1) * size)
        rows.append((stage, span(members), span(placement.nodes_with(members))))
    return table(("pipeline stage", "ranks", "nodes"), rows)


def _engine_table(placement: Placement) -> list[str]:
    rows = []
    for engine in placement.engines:
        slots = placement.engine_slots(engine)
        rows.append((engine.rank, engine.worker_type, engine.model, span(placement.nodes_with(slots)), span(slots)))
    keep = [0, *(i for i in (1, 2) if len({row[i] for row in rows}) > 1), 3, 4]
    head = ("engine", "kind", "model", "node", "slots")
    return table([head[i] for i in keep], [[row[i] for i in keep] for row in rows])


def _notes(placement: Placement, args: Args) -> list[str]:
    notes = [_about_nodes(placement, args)] if placement.nodes else []
    if len(placement.nodes) > 1 and not (args.ray_address or os.environ.get("RAY_ADDRESS")):
        notes.append(
            f"{len(placement.nodes):,} nodes must be a running Ray cluster that the run joins (--ray-address or "
            "$RAY_ADDRESS); without one it has the slots of the machine on which it is started."
        )
    if placement.idle:
        notes.append(f"{count(placement.idle, 'slot')} of the rollout kept free (placeholder groups).")
    return notes


def split_warnings(placement: Placement) -> list[str]:
    """One sentence about engines that could not start on nodes as they were assumed."""
    if not placement.split:
        return []
    several = len(placement.split) > 1
    return [
        f"{_plural('engine', [engine.rank for engine in placement.split])} would lie across the border of two nodes, "
        f"and the slots of an engine process must be on one (see Placement): unless nodes are larger, "
        f"{'these engines' if several else 'this engine'} cannot start; change --actor-num-gpus-per-node, "
        "--rollout-num-gpus-per-engine or --num-gpus-per-node"
    ]


def _about_nodes(placement: Placement, args: Args) -> str:
    taken = f"Nodes are taken to have {args.num_gpus_per_node} slots (--num-gpus-per-node)"
    if args.actor_num_gpus_per_node > args.num_gpus_per_node and placement.trainer is not None:
        taken += f", those to train on {args.actor_num_gpus_per_node} (--actor-num-gpus-per-node)"
    if placement.trainer is None:
        return f"{taken}; Ray fills one after another."
    used = placement.nodes_with(range(placement.layout.trainer_slots))
    if len(used) == args.actor_num_nodes:
        return f"{taken}; Ray fills one after another."
    return (
        f"{taken}; Ray fills one after another, so that --actor-num-nodes {args.actor_num_nodes} x "
        f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node} are on {_plural('node', used)}."
    )


def _plural(word: str, numbers: Sequence[int]) -> str:
    return f"{word if len(numbers) == 1 else word + 's'} {span(numbers)}"
