"""Every process of a run: how many, on which nodes and slots, and what each does."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from slime.arguments.args import Args
from slime.arguments.placement import (
    EnginePlan,
    EngineSizes,
    Layout,
    Node,
    engine_sizes,
    engines_of,
    engines_split_across_nodes,
    layout_of,
    models_of,
    node_of_slot,
    nodes_of,
)

Kind = Literal["side by side", "colocated", "training only", "generation only", "external engines", "no slots"]


@dataclass(frozen=True)
class Router:
    """The router of a model. ``address`` is None where it is chosen at the start."""

    model: str
    address: str | None


@dataclass(frozen=True)
class Placement:
    """The placement of a run: slots, nodes and ranks.

    Slots are numbered from 0 over all nodes; trainer rank r is on slot r (a critic's rank r too), and engine slots
    count from ``layout.rollout_offset``. ``engine_sizes``: one for each of ``engines``. ``idle``: slots of the rollout
    that no engine uses. ``external``: addresses of engines that run already. ``split``: engines that need a node larger
    than was assumed.
    """

    kind: Kind
    layout: Layout
    nodes: tuple[Node, ...]
    trainer: TrainerRanks | None
    critic: bool
    engines: tuple[EnginePlan, ...]
    engine_sizes: tuple[EngineSizes, ...]
    routers: tuple[Router, ...]
    external: tuple[str, ...]
    idle: int
    split: tuple[EnginePlan, ...]

    def engine_slots(self, engine: EnginePlan) -> range:
        """The slots of an engine among all."""
        first = self.layout.rollout_offset + engine.gpu_offset
        return range(first, first + engine.num_gpus)

    def nodes_with(self, slots: range) -> range:
        """The nodes that hold ``slots`` (consecutive)."""
        found = [node.index for node in self.nodes if node.slots.start < slots.stop and slots.start < node.slots.stop]
        return range(found[0], found[-1] + 1)


def placement_of(args: Args) -> Placement:
    """Return where the flags put every process. Raises ValueError where engines or ranks do not fit their slots."""
    layout = layout_of(args)
    nodes = nodes_of(args, layout)
    engines = engines_of(args)
    return Placement(
        kind=_kind(args, layout),
        layout=layout,
        nodes=tuple(nodes),
        trainer=ranks_of(args) if layout.trainer_slots and not args.debug_rollout_only else None,
        critic=bool(args.use_critic) and not args.debug_rollout_only,
        engines=tuple(engines),
        engine_sizes=tuple(engine_sizes(args, engine) for engine in engines),
        routers=tuple(_routers(args)),
        external=tuple(args.rollout_external_engine_addrs or ()) if not args.debug_train_only else (),
        idle=layout.rollout_slots - sum(engine.num_gpus for engine in engines),
        split=tuple(engines_split_across_nodes(engines, node_of_slot(nodes), layout.rollout_offset)),
    )


def _kind(args: Args, layout: Layout) -> Kind:
    if layout.slots == 0 and not args.rollout_external:
        return "no slots"
    if args.debug_train_only:
        return "training only"
    if args.rollout_external:
        return "external engines"
    if args.debug_rollout_only:
        return "generation only"
    return "colocated" if args.colocate else "side by side"


def _routers(args: Args) -> list[Router]:
    if args.debug_train_only:
        return []
    names = [model.name for model in models_of(args) or ()] or ["default"]
    given = None
    if args.sglang_router_ip is not None:
        given = f"{args.sglang_router_ip}:{args.sglang_router_port}"
    return [Router(name, given if i == 0 else None) for i, name in enumerate(names)]


Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp"]
NAMES: dict[Axis, str] = {
    "tp": "tensor",
    "cp": "context",
    "dp": "data",
    "pp": "pipeline",
    "etp": "expert tensor",
    "ep": "expert",
    "edp": "expert data",
}
DENSE: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class TrainerRanks:
    """The ranks ``0..world_size-1`` of a trainer and the sizes of its axes.

    Attention, dense layers and data are divided along tp x cp x dp x pp, experts along etp x ep x edp x pp. In the
    default order consecutive ranks differ in tp first, then in cp, dp and pp (for experts: etp, ep, edp, pp); with
    ``pipeline_before_data`` (``--use-tp-pp-dp-mapping``) pp comes before dp.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1
    pipeline_before_data: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def size(self, axis: Axis) -> int:
        return int(getattr(self, axis))

    def stride(self, axis: Axis) -> int:
        """The distance between neighbors along ``axis``, in ranks."""
        order = self._order(axis)
        return prod(self.size(faster) for faster in order[: order.index(axis)])

    def coordinate(self, rank: int, axis: Axis) -> int:
        return rank // self.stride(axis) % self.size(axis)

    def group(self, rank: int, axis: Axis) -> range:
        """The ranks that differ from ``rank`` in nothing but ``axis``, in order."""
        stride = self.stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return range(first, first + self.size(axis) * stride, stride)

    def axes(self) -> list[Axis]:
        """The axes along which ranks differ, fastest first, dense ones before those of the experts."""
        dense = [axis for axis in self._order("tp") if self.size(axis) > 1]
        if self.ep == 1 and self.etp == self.tp:
            return dense
        return [*dense, *(axis for axis in self._order("ep") if axis != "pp" and self.size(axis) > 1)]

    def _order(self, axis: Axis) -> tuple[Axis, ...]:
        order = DENSE if axis in DENSE else EXPERT
        return (*order[:2], order[3], order[2]) if self.pipeline_before_data else order


def ranks_of(args: Args) -> TrainerRanks:
    """Return the trainer's ranks. Raises ValueError where the sizes do not divide the training slots."""
    slots, found = args.actor_num_nodes * args.actor_num_gpus_per_node, unchecked_ranks_of(args)
    tp, pp, cp, etp, ep = found.tp, found.pp, found.cp, found.etp, found.ep
    for what, size in (
        (f"tensor {tp} x pipeline {pp} x context {cp}", tp * pp * cp),
        (f"expert tensor {etp} x expert {ep} x pipeline {pp}", etp * ep * pp),
    ):
        if slots % size:
            raise ValueError(f"{slots} training slots cannot be divided by {what} = {size} parallel slots")
    return found


def unchecked_ranks_of(args: Args) -> TrainerRanks:
    """Return the trainer's ranks, at least one data-parallel one, whether or not they fill the training slots."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    return TrainerRanks(
        tp=tp,
        cp=cp,
        dp=max(1, args.actor_num_nodes * args.actor_num_gpus_per_node // (tp * pp * cp)),
        pp=pp,
        etp=args.expert_tensor_parallel_size or tp,
        ep=args.expert_model_parallel_size,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
    )
