"""Slots that a run asks for, who gets them, and the engines they hold. Pure: the run and ``--dry-run`` share it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slime.arguments.args import Args


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


def layout_of(args: Args) -> Layout:
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
    """One engine: its ``rank`` among all, its first slot among the rollout's, its slots in total and per node.

    ``group``: the number of its group among all groups of all models. ``update_weights``: whether its model gets the
    trainer's weights. ``offload``: whether it releases its memory while the trainer has the devices. ``overrides``: the
    SGLang server arguments of its group, which beat all others. ``url``: where an engine runs that others started.
    """

    rank: int
    gpu_offset: int
    num_gpus: int
    num_gpus_on_node: int
    nodes: int
    worker_type: str = "regular"
    model: str = "default"
    group: int = 0
    update_weights: bool = True
    offload: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None

    def __str__(self) -> str:
        kind = self.kind if self.url is None else f"external {self.kind}"
        return f"{kind}engine {self.rank}" + ("" if self.model == "default" else f" of model {self.model}")

    @property
    def kind(self) -> str:
        """The word before "engine" in messages; none for a regular one."""
        return "" if self.worker_type == "regular" else f"{self.worker_type} "

    def parts(self) -> list[range]:
        """The slots, among the rollout's, of the engine's process on each of its nodes."""
        starts = range(self.gpu_offset, self.gpu_offset + self.num_gpus, self.num_gpus_on_node)
        return [range(start, start + self.num_gpus_on_node) for start in starts]


def plan_engines(
    *,
    rollout_slots: int,
    slots_per_engine: int,
    slots_per_node: int,
    names: tuple[str, str] = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine"),
) -> list[EnginePlan]:
    """Return the engines that ``rollout_slots`` hold; ``names`` are those of the first two numbers in messages.

    Raises ValueError when the slots are no multiple of an engine's, or an engine of several nodes does not fill them.
    """
    if rollout_slots % slots_per_engine:
        raise ValueError(
            f"{names[0]} {rollout_slots} is no multiple of {names[1]} {slots_per_engine}: "
            f"{rollout_slots % slots_per_engine} slots would stay idle"
        )
    nodes = max(1, slots_per_engine // slots_per_node)
    if slots_per_engine > slots_per_node and slots_per_engine % slots_per_node:
        raise ValueError(
            f"an engine of {names[1]} {slots_per_engine} slots spans nodes of --num-gpus-per-node {slots_per_node}, "
            "so it must be a multiple of that"
        )
    return [
        EnginePlan(rank, rank * slots_per_engine, slots_per_engine, min(slots_per_engine, slots_per_node), nodes)
        for rank in range(rollout_slots // slots_per_engine)
    ]


class ServerGroup(Protocol):
    """Engines of one kind on consecutive slots; the kind ``placeholder`` keeps its slots free."""

    @property
    def worker_type(self) -> str: ...
    @property
    def num_gpus(self) -> int: ...
    @property
    def num_gpus_per_engine(self) -> int | None: ...
    @property
    def overrides(self) -> Mapping[str, Any]: ...


class Model(Protocol):
    """A model that engines serve, behind a separate router."""

    @property
    def name(self) -> str: ...
    @property
    def model_path(self) -> str | None: ...
    @property
    def update_weights(self) -> bool | None: ...
    @property
    def server_groups(self) -> Sequence[ServerGroup]: ...
    @property
    def has_pd_disaggregation(self) -> bool: ...


def plan_groups(models: Iterable[Model], *, slots_per_node: int) -> list[EnginePlan]:
    """Return the engines of every group of every model, on consecutive slots in the order in which they are listed.

    Raises ValueError, naming model and group, where the slots of a group do not make whole engines.
    """
    engines: list[EnginePlan] = []
    offset = 0
    groups = [(model.name, group) for model in models for group in model.server_groups]
    for number, (model, group) in enumerate(groups):
        for plan in _engines_of_group(model, group, slots_per_node):
            place: dict[str, Any] = {"rank": len(engines), "gpu_offset": offset + plan.gpu_offset, "group": number}
            engines.append(replace(plan, worker_type=group.worker_type, model=model, **place))
        offset += group.num_gpus
    return engines


def _engines_of_group(model: str, group: ServerGroup, slots_per_node: int) -> list[EnginePlan]:
    if group.worker_type == "placeholder":
        return []
    if group.num_gpus_per_engine is None:
        raise ValueError(f"model {model}: its {group.worker_type} engines have no num_gpus_per_engine yet")
    try:
        return plan_engines(
            rollout_slots=group.num_gpus,
            slots_per_engine=group.num_gpus_per_engine,
            slots_per_node=slots_per_node,
            names=("num_gpus", "num_gpus_per_engine"),
        )
    except ValueError as error:
        raise ValueError(f"model {model}, {group.worker_type} engines: {error}") from error


def models_of(args: Args) -> Sequence[Model] | None:
    """Return the models that ``--sglang-config`` or ``--prefill-num-servers`` describe; None without them."""
    if args.sglang_config is None and args.prefill_num_servers is None:
        return None
    from slime.arguments.files.sglang_config import deployment

    # Warnings about the file are given once, when flags are parsed.
    parsing = hasattr(args, "warnings")
    models: Sequence[Model] = deployment(args if parsing else Args(**vars(args), warnings=[])).models
    return models


def args_of_group(args: Args, group: ServerGroup) -> Args:
    """Return ``args`` as they would be if the flags described the engines of ``group``."""
    values = {f"sglang_{name}": value for name, value in group.overrides.items()}
    found = Args(**{**vars(args), "sglang_tp_size": None, **values})
    if group.num_gpus_per_engine is not None:
        found.rollout_num_gpus_per_engine = group.num_gpus_per_engine
    found.hf_checkpoint = group.overrides.get("model_path", args.hf_checkpoint)
    return found


def engines_of(args: Args) -> list[EnginePlan]:
    """Return the engines that the flags ask for; none on slots that are not the rollout's.

    Raises ValueError where the slots do not make whole engines.
    """
    layout = layout_of(args)
    if layout.rollout_slots == 0:
        return []
    offload = bool(args.offload_rollout and not args.debug_rollout_only)
    models = models_of(args)
    if models is None:
        plans = plan_engines(
            rollout_slots=layout.rollout_slots,
            slots_per_engine=args.rollout_num_gpus_per_engine,
            slots_per_node=args.num_gpus_per_node,
        )
        return [replace(plan, offload=offload) for plan in plans]
    settings: list[dict[str, Any]] = []
    first = layout.rollout_offset
    for model in models:
        for group in model.server_groups:
            # What lies beyond the trainer's slots has its devices for itself.
            shares = offload and first < layout.trainer_slots
            settings.append(
                {"update_weights": model.update_weights, "offload": shares, "overrides": dict(group.overrides)}
            )
            first += group.num_gpus
    return [
        replace(plan, **settings[plan.group]) for plan in plan_groups(models, slots_per_node=args.num_gpus_per_node)
    ]


def spare_slots(args: Args) -> int:
    """Return how many slots the engines take that may be added until every model has ``--rollout-max-engines``."""
    if args.rollout_max_engines is None or args.rollout_external:
        return 0
    models: dict[str, list[EnginePlan]] = {}
    for plan in engines_of(args):
        if not plan.offload:
            models.setdefault(plan.model, []).append(plan)
    return sum((args.rollout_max_engines - len(plans)) * plans[0].num_gpus for plans in models.values())


@dataclass(frozen=True)
class EngineSizes:
    """Parallel sizes of one engine. Data parallelism is that of attention, within the tensor-parallel ranks: ``dp``
    groups each hold all of the attention and have separate requests.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def attention_tp(self) -> int:
        """Ranks that share the attention of a request."""
        return max(1, self.tp // self.dp)

    @property
    def gpus(self) -> int:
        """Slots of the engine."""
        return self.tp * self.pp


def engine_sizes(args: Args, engine: EnginePlan) -> EngineSizes:
    """Return the parallel sizes of ``engine``: its group's, else the flags'."""

    def size(name: str) -> int:
        return int(engine.overrides.get(f"{name}_size") or getattr(args, f"sglang_{name}_size", None) or 1)

    tp, pp = engine.overrides.get("tp_size"), size("pp")
    return EngineSizes(tp=int(tp or engine.num_gpus // pp), pp=pp, dp=size("dp"), ep=size("ep"))


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


def nodes_of(args: Args, layout: Layout) -> list[Node]:
    """Return the nodes of a run."""
    return pack(layout, trainer_slots_per_node=args.actor_num_gpus_per_node, slots_per_node=args.num_gpus_per_node)


def node_of_slot(nodes: Iterable[Node]) -> list[int]:
    """Return the node of every slot."""
    return [node.index for node in nodes for _ in node.slots]


def engines_split_across_nodes(
    engines: Iterable[EnginePlan], node_of_slot: Sequence[Hashable], offset: int
) -> list[EnginePlan]:
    """Return the engines that cannot work: a process of theirs would need slots of two nodes.

    ``offset`` is the first slot of the rollout.
    """
    return [
        engine
        for engine in engines
        if any(len({node_of_slot[offset + slot] for slot in part}) > 1 for part in engine.parts())
    ]
