"""Which coordinates the trainer's ranks have: Megatron's order of tensor, context, expert, data and pipeline axes."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from math import prod
from typing import Literal

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
        """The distance between neighbours along ``axis``, in ranks."""
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


def ranks_of(args: Namespace) -> TrainerRanks:
    """Return the trainer's ranks. Raises ValueError where the sizes do not divide the training slots."""
    world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    for what, size in (
        (f"tensor {tp} x pipeline {pp} x context {cp}", tp * pp * cp),
        (f"expert tensor {etp} x expert {ep} x pipeline {pp}", etp * ep * pp),
    ):
        if world_size % size:
            raise ValueError(f"{world_size} training slots cannot be divided by {what} = {size} parallel slots")
    return TrainerRanks(
        tp=tp,
        cp=cp,
        dp=world_size // (tp * pp * cp),
        pp=pp,
        etp=etp,
        ep=ep,
        pipeline_before_data=args.use_tp_pp_dp_mapping,
    )
