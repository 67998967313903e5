"""Layouts of Hugging Face tensors in Megatron's tensor-parallel shards.

A layout is read in both directions. ``shard`` cuts this rank's Megatron tensor out of the full Hugging Face tensors
(reading no more of them than needed: the sources may be lazy slices of a file); ``unshard`` puts the shards of all
ranks together and returns the Hugging Face tensors again. ``hf_shapes`` says which shapes those have.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    Index = int | slice | tuple[int | slice | None, ...]

    class Slice(Protocol):
        """A lazy view of a tensor in a file."""

        def get_shape(self) -> list[int]:
            """Return the shape."""
            ...

        def __getitem__(self, key: Index, /) -> torch.Tensor:
            """Read these elements alone."""
            ...


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dims:
    """The sizes of the whole model that layouts need.

    ``num_experts`` counts the routed ones of a layer, ``delta_net_keys`` the rows of all keys of a gated delta net.
    ``shared_groups`` and ``shared_channels``: key heads, and size per head, of layers whose values are their keys.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    num_experts: int = 0
    delta_net_keys: int = 0
    shared_groups: int = 0
    shared_channels: int = 0

    @property
    def heads_per_group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.num_attention_heads // self.num_query_groups


class Layout(ABC):
    """See the module's docstring. ``sharded``: whether tensor-parallel ranks hold different parts."""

    sharded = True

    @abstractmethod
    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        """Return the shapes of the Hugging Face tensors behind a Megatron shard of shape ``local``."""

    @abstractmethod
    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        """Return the Megatron tensor of ``tp_rank``. ``sources`` can be indexed like tensors."""

    @abstractmethod
    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        """Return the full Hugging Face tensors, contiguous."""


def _rows(source: torch.Tensor | Slice, start: int, stop: int) -> torch.Tensor:
    return source[start:stop]


def _length(source: torch.Tensor | Slice) -> int:
    return source.get_shape()[0] if hasattr(source, "get_shape") else source.shape[0]


def _part(source: torch.Tensor | Slice, rank: int, size: int) -> torch.Tensor:
    """Return the ``rank``-th of ``size`` equal blocks of rows."""
    block = _length(source) // size
    return _rows(source, rank * block, (rank + 1) * block)


class Replicated(Layout):
    """Every rank holds the whole tensor (norms, biases of row-parallel layers)."""

    sharded = False

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [local]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return sources[0][:]

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [shards[0].contiguous()]


class ColumnParallel(Layout):
    """Split along the first dimension (column-parallel linear layers without further structure)."""

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [(local[0] * tp_size, *local[1:])]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return _part(sources[0], tp_rank, tp_size)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [torch.cat(list(shards))]


class RowParallel(Layout):
    """Split along the second dimension (row-parallel linear layers: attention output, second MLP layer)."""

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [(local[0], local[1] * tp_size)]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        source = sources[0]
        width = (source.get_shape() if hasattr(source, "get_shape") else source.shape)[1] // tp_size
        return source[:, tp_rank * width : (tp_rank + 1) * width]

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [torch.cat(list(shards), dim=1)]


class Vocabulary(Layout):
    """Rows of the vocabulary, padded with zero rows to ``padded_vocab_size``; the padding is cut off on the way out."""

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [(dims.vocab_size, *local[1:])]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        block = dims.padded_vocab_size // tp_size
        start, vocab = tp_rank * block, _length(sources[0])
        rows = _rows(sources[0], min(start, vocab), min(start + block, vocab))
        padding = rows.new_zeros(block - rows.shape[0], *rows.shape[1:])
        return torch.cat([rows, padding])

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: dims.vocab_size].contiguous()]


class QueryKeyValue(Layout):
    """``q, k, v`` interleaved per query group: ``[heads_per_group * d, d, d]`` rows each, groups split over ranks.

    For weights ``[rows, hidden]`` and biases ``[rows]`` alike.
    """

    projections = 2
    """Beside that of queries: keys, values."""

    def groups(self, dims: Dims) -> int:
        """Return the number of key heads."""
        return dims.num_query_groups

    def channels(self, dims: Dims) -> int:
        """Return the size of a head."""
        return dims.kv_channels

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        d = self.channels(dims)
        rows = [dims.num_attention_heads * d] + [self.groups(dims) * d] * self.projections
        return [(size, *local[1:]) for size in rows]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        if self.groups(dims) % tp_size == 0:
            return self._interleave([_part(source, tp_rank, tp_size) for source in sources], dims)
        # Fewer groups than ranks: a rank holds a block of rows out of the middle of a group.
        return _part(self._interleave([source[:] for source in sources], dims), tp_rank, tp_size)

    def _interleave(self, qkv: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        groups = qkv[1].shape[0] // self.channels(dims)
        parts = [x.reshape(groups, -1, *x.shape[1:]) for x in qkv]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        full = torch.cat(list(shards))
        groups = full.reshape(self.groups(dims), -1, *full.shape[1:])
        d = self.channels(dims)
        rows = [dims.num_attention_heads // self.groups(dims) * d] + [d] * self.projections
        return [x.flatten(0, 1).contiguous() for x in groups.split(rows, dim=1)]


class QueryKey(QueryKeyValue):
    """``QueryKeyValue`` of layers whose values are their keys, which have heads of their own."""

    projections = 1

    def groups(self, dims: Dims) -> int:
        """Return the number of key heads."""
        return dims.shared_groups

    def channels(self, dims: Dims) -> int:
        """Return the size of a head."""
        return dims.shared_channels


class DeltaNetRows(ColumnParallel):
    """All queries of a gated delta net above all keys above all values: each rank holds its rows of each of them."""

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        if tp_size == 1:
            return sources[0][:]
        ends = [0, dims.delta_net_keys, 2 * dims.delta_net_keys, _length(sources[0])]
        parts = []
        for start, end in itertools.pairwise(ends):
            block = (end - start) // tp_size
            parts.append(_rows(sources[0], start + tp_rank * block, start + (tp_rank + 1) * block))
        return torch.cat(parts)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        keys = dims.delta_net_keys // len(shards)
        ranks = [shard.tensor_split([keys, 2 * keys]) for shard in shards]
        return [torch.cat([part for parts in zip(*ranks, strict=True) for part in parts])]


class GateUp(Layout):
    """The two halves of a gated MLP's first layer; each rank holds its rows of ``gate`` above its rows of ``up``."""

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [(local[0] // 2 * tp_size, *local[1:])] * 2

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return torch.cat([_part(source, tp_rank, tp_size) for source in sources])

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True)
class Transposed(Layout):
    """Matrices that Hugging Face stores transposed; ``layout`` describes them as they are in Megatron."""

    layout: Layout

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [shape[::-1] for shape in self.layout.hf_shapes(local, tp_size, dims)]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return self.layout.shard([source[:].t() for source in sources], tp_rank, tp_size, dims)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [full.t().contiguous() for full in self.layout.unshard(shards, dims)]
