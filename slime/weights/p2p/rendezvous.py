"""Messages between trainer ranks and engine ranks in a store, as JSON.

The trainer opens the store and says which tensors it sends; every engine rank answers with its plan and the addresses
of its memory. In every push each trainer rank leaves the checksums of what it has written for every engine rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from slime.weights.p2p.plan import Piece

BACKEND = "slime-p2p-"
"""Begins what a request names as the backend of its group; a server without slime's plug-in refuses such a group."""
TENSORS = "tensors"
CHECKSUM = "xxh3-128"
"""Of what is written, taken on both sides."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed."""

    def set(self, key: str, value: str) -> None:
        """Set."""
        ...

    def get(self, key: str) -> bytes:
        """Return the value, when there is one."""
        ...


@dataclass(frozen=True)
class EngineRank:
    """Answer of an engine rank: ``parameters`` by name: address and dtype of their memory."""

    agent: str
    parameters: Mapping[str, tuple[int, str]]
    pieces: Sequence[Piece]


def put(store: Store, key: str, value: object) -> None:
    """Set ``key``."""
    store.set(key, json.dumps(value))


def get(store: Store, key: str) -> Any:
    """Return the value of ``key``. Raises ``torch.distributed.DistStoreError`` when it is not set in time."""
    return json.loads(store.get(key))


def put_rank(store: Store, rank: int, engine: EngineRank) -> None:
    """Set the answer of engine rank ``rank``, counted over all engines from 0."""
    put(store, f"rank {rank}", asdict(engine))


def get_rank(store: Store, rank: int) -> EngineRank:
    """Return the answer of engine rank ``rank``."""
    found = get(store, f"rank {rank}")
    parameters = {name: (address, dtype) for name, (address, dtype) in found["parameters"].items()}
    return EngineRank(found["agent"], parameters, [Piece.of_json(piece) for piece in found["pieces"]])


def sums_key(trainer: int, engine: int) -> str:
    """Return where trainer rank ``trainer`` leaves checksums for engine rank ``engine``: by the number of a piece."""
    return f"sums {trainer} {engine}"
