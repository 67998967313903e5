"""Every process of a run: how many, on which nodes and slots, and what each does."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from slime.arguments.plan.nodes import Node, node_of_slot, nodes_of, torn_engines
from slime.arguments.plan.placement import EnginePlan, Layout, engines_of, layout_of, models_of
from slime.arguments.plan.ranks import TrainerRanks, ranks_of

Kind = Literal["side by side", "colocated", "training only", "generation only", "external engines", "no slots"]


@dataclass(frozen=True)
class Router:
    """The router of a model. ``address`` is None where it is chosen at the start."""

    model: str
    address: str | None


@dataclass(frozen=True)
class EngineSizes:
    """How the slots of one engine are used. Data parallelism is that of attention, within the tensor-parallel ranks."""

    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Placement:
    """Where everything runs.

    Slots are numbered from 0 over all nodes; trainer rank r is on slot r (a critic's rank r too), and engine slots
    count from ``layout.rollout_offset``. ``engine_sizes``: one for each of ``engines``. ``idle``: slots of the rollout
    that no engine uses. ``external``: addresses of engines that run already. ``torn``: engines that need a node larger
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
    torn: tuple[EnginePlan, ...]

    def engine_slots(self, engine: EnginePlan) -> range:
        """The slots of an engine among all."""
        first = self.layout.rollout_offset + engine.gpu_offset
        return range(first, first + engine.num_gpus)

    def nodes_with(self, slots: range) -> range:
        """The nodes that hold ``slots`` (consecutive)."""
        found = [node.index for node in self.nodes if node.slots.start < slots.stop and slots.start < node.slots.stop]
        return range(found[0], found[-1] + 1)


def placement_of(args: Namespace) -> Placement:
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
        engine_sizes=tuple(_engine_sizes(args, engine) for engine in engines),
        routers=tuple(_routers(args)),
        external=tuple(args.rollout_external_engine_addrs or ()) if not args.debug_train_only else (),
        idle=layout.rollout_slots - sum(engine.num_gpus for engine in engines),
        torn=tuple(torn_engines(engines, node_of_slot(nodes), layout.rollout_offset)),
    )


def _kind(args: Namespace, layout: Layout) -> Kind:
    if layout.slots == 0 and not args.rollout_external:
        return "no slots"
    if args.debug_train_only:
        return "training only"
    if args.rollout_external:
        return "external engines"
    if args.debug_rollout_only:
        return "generation only"
    return "colocated" if args.colocate else "side by side"


def _engine_sizes(args: Namespace, engine: EnginePlan) -> EngineSizes:
    groups = [group for model in models_of(args) or () for group in model.server_groups]
    overrides = groups[engine.group].overrides if groups else {}

    def size(name: str) -> int:
        return int(overrides.get(f"{name}_size") or getattr(args, f"sglang_{name}_size", None) or 1)

    pp = size("pp")
    return EngineSizes(tp=int(overrides.get("tp_size") or engine.num_gpus // pp), pp=pp, dp=size("dp"), ep=size("ep"))


def _routers(args: Namespace) -> list[Router]:
    if args.debug_train_only:
        return []
    names = [model.name for model in models_of(args) or ()] or ["default"]
    given = None
    if args.sglang_router_ip is not None:
        given = f"{args.sglang_router_ip}:{args.sglang_router_port}"
    return [Router(name, given if i == 0 else None) for i, name in enumerate(names)]
