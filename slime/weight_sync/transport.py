"""Interface of every transport to the updater, and what it must know of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slime.arguments.args import Args
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo


class WeightSource(Protocol):
    """The part of a trainer that the transports read."""

    model: list[Any]
    args: Args


class Transport(Protocol):
    """Carries all weights of a trainer to a fixed set of engines. Every method is collective over the trainer."""

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        """Prepare the channels to ``engines`` (``clients`` in the same order)."""
        ...

    def prepare(self, source: WeightSource) -> None:
        """Do what can be done for ``send`` while the engines keep generating."""
        ...

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        """Send everything; ``weight_version`` travels with the last bucket only. Return the bytes this rank sent."""
        ...

    def disconnect(self) -> None:
        """Close the channels."""
        ...


def drain(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Run a collective stream of weights to its end on a rank that sends nothing itself."""
    for _ in stream:
        pass


@dataclass(frozen=True)
class TrainerLayout:
    """Position of this rank. ``is_source``: whether it sends those of its pipeline stage (DP, CP, TP rank 0)."""

    rank: int
    world_size: int
    pp_rank: int
    pp_size: int
    is_source: bool

    @classmethod
    def current(cls) -> TrainerLayout:
        """Read the layout from the initialized megatron parallel state."""
        import torch.distributed as dist

        from slime.backends.megatron_utils import import_megatron

        import_megatron()
        from megatron.core import parallel_state as mpu

        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
            is_source=mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        )
