"""What every transport offers to the updater."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo


class WeightSource(Protocol):
    """The part of a trainer that the transports read."""

    model: list[Any]
    args: Any


class Transport(Protocol):
    """Carries all weights of a trainer to a fixed set of engines. Every method is collective over the trainer."""

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        """Prepare the channels to ``engines`` (``clients`` in the same order)."""
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
