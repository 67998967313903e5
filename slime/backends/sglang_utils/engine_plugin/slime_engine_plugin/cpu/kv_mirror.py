"""Decode attention of many sequences at once on a CPU.

SGLang's torch-native backend gathers the keys and values of each sequence again in every layer of every step, and calls
attention once per sequence. Here every running request has a row in ``[rows, kv_heads, capacity, head_dim]`` buffers,
one pair per layer. A step appends one position to every row and attends over slices of the buffers, a few rows per
call (:class:`KVMirror`). Rows that would need too much memory are gathered in every layer instead, a few at a time into
the same two buffers (:class:`GatheredRows`). Only torch is needed, so that both can be tested without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS_PER_CALL = 32
"""Rows of one attention call: enough to be worth a dispatch, few enough for the rows to have similar lengths."""
POSITIONS_OF_ONE_CALL = 16384
"""So few positions, padding included, are one call."""
MIN_CAPACITY = 64
"""Positions of the smallest row; capacity grows by doubling."""

Request = tuple[int, str]
"""Slot and id of a request: SGLang gives a slot to another request as soon as one has ended."""
Pool = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, [places, kv_heads, head_dim]."""


class Call(NamedTuple):
    """One attention call: rows ``start`` to ``end``, the longest of ``width``.

    mask: [rows, 1, 1, width], additive; None where all rows have that length.
    """

    start: int
    end: int
    width: int
    mask: torch.Tensor | None


def calls_for(lengths: list[int]) -> list[Call]:
    """Split rows of these lengths into calls."""
    longest, count = max(lengths), len(lengths)
    rows = count if count * longest <= POSITIONS_OF_ONE_CALL else ROWS_PER_CALL
    mask = None
    if min(lengths) < longest:
        hidden = torch.arange(longest) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    calls = []
    for start in range(0, count, rows):
        end = min(start + rows, count)
        width = max(lengths[start:end])
        ragged = None if mask is None or min(lengths[start:end]) == width else mask[start:end, ..., :width]
        calls.append(Call(start, end, width, ragged))
    return calls


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float | None
) -> torch.Tensor:
    """Return the attention output for query, both [rows, kv_heads, group, head_dim]: one position of each row.

    key, value: [rows, kv_heads, width, head_dim]. In float32 by products of matrices, which take two thirds of the time
    of torch's attention: its blocks are made for many positions.
    """
    if query.dtype != torch.float32:
        mask = None if call.mask is None else call.mask.to(query.dtype)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    rows, kv_heads, group, head_dim = query.shape
    query = query * (head_dim**-0.5 if scale is None else scale)
    scores = torch.bmm(query.view(-1, group, head_dim), key.flatten(0, 1).transpose(1, 2))
    if call.mask is not None:
        scores.view(rows, kv_heads, group, -1).add_(call.mask)
    return torch.bmm(torch.softmax(scores, dim=-1), value.flatten(0, 1)).view(query.shape)


@dataclass
class DecodeStep:
    """State that all layers of one decode step share.

    ``order[row]`` is the position in the batch of the request of a row; None where rows are in the batch's order.
    """

    number: int
    order: torch.Tensor | None
    positions: torch.Tensor
    tokens: torch.Tensor
    lengths: list[int]
    filled: list[int]
    calls: list[Call]
    places: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def by_row(self, batch: torch.Tensor) -> torch.Tensor:
        """Return ``batch`` [batch, ...] in the order of the rows."""
        return batch if self.order is None else batch[self.order]

    def place_of_new(self, kv_heads: int, capacity: int) -> torch.Tensor:
        """Return the new positions' places in buffers [rows * kv_heads * capacity, head_dim], shared by most layers."""
        if (kv_heads, capacity) not in self.places:
            heads = torch.arange(len(self.lengths) * kv_heads).view(-1, kv_heads)
            self.places[kv_heads, capacity] = (heads * capacity + self.positions[:, None]).view(-1)
        return self.places[kv_heads, capacity]


@dataclass
class LayerBuffers:
    """Keys and values of one layer, [rows, kv_heads, capacity, head_dim], and the last step they have seen."""

    keys: torch.Tensor
    values: torch.Tensor
    step: int


class KVMirror:
    """Rows of the requests that were decoded in the last step.

    A row is used again only when it holds all tokens but the last of the same request, at the same places of the KV
    pool, and the request has not been extended since (``forget``). Everything else is copied from the pool, so a row is
    never stale. Positions past a row's length are zero: what is masked must at least be finite.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: positions of all rows together; the size of the KV pool bounds the memory to that of the pool."""
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self._requests: list[Request] = []  # by row
        self._lengths: list[int] = []  # by row: positions that hold keys and values
        self._tokens = torch.zeros((0, 0), dtype=torch.int32)  # [rows, capacity]: places in the KV pool
        self._layers: dict[int, LayerBuffers] = {}
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self._layers.values())

    def forget(self, slots: Iterable[int]) -> None:
        """Drop the rows of these request slots: their keys and values are being rewritten."""
        gone = set(slots)
        for row in reversed(range(len(self._requests))):
            if self._requests[row][0] in gone:
                self._drop(row)

    def plan(self, requests: list[Request], lengths: list[int], req_to_token: torch.Tensor) -> DecodeStep | None:
        """Prepare a decode step; None (and no memory kept) when the rows would exceed the limit.

        requests: the batch; lengths: tokens of each, with the one that this step adds; req_to_token: [slots, context]
        places in the KV pool.
        """
        at = {request: position for position, request in enumerate(requests)}
        for row in reversed(range(len(self._requests))):
            if self._requests[row] not in at:
                self._drop(row)
        kept = set(self._requests)
        self._requests += [request for request in requests if request not in kept]
        self._lengths += [0] * (len(requests) - len(kept))
        if not self._reserve(len(requests), max(lengths)):
            had_some = bool(self._layers)  # with room for what is gone: try again with room for these only
            self.clear()
            return self.plan(requests, lengths, req_to_token) if had_some else None
        order = [at[request] for request in self._requests]
        by_row = [lengths[position] for position in order]
        longest = max(by_row)
        tokens = req_to_token[torch.tensor([slot for slot, _ in self._requests]), :longest]
        last = torch.tensor(by_row) - 1
        written = torch.arange(longest) < last[:, None]
        same = ((self._tokens[: len(order), :longest] == tokens) | ~written).all(dim=1).tolist()
        filled = [
            row for row, (length, now) in enumerate(zip(self._lengths, by_row, strict=True))
            if length != now - 1 or not same[row]
        ]  # fmt: skip
        self._tokens[: len(order), :longest] = tokens
        self._lengths = by_row
        self._step += 1
        moved = None if order == list(range(len(order))) else torch.tensor(order)
        return DecodeStep(self._step, moved, last, tokens, by_row, filled, calls_for(by_row))

    def attend(
        self,
        step: DecodeStep,
        layer_id: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: Pool,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the attention output [batch, heads, head_dim].

        query: [batch, heads, head_dim]; key, value: [batch, kv_heads, head_dim] of the new tokens; pool: of the layer,
        to which the new ones have been written.
        """
        batch, kv_heads, head_dim = key.shape
        buffers = self._buffers(layer_id, key)
        missed = buffers.step != step.number - 1
        for row in range(batch) if missed else step.filled:
            self._fill(buffers, row, step.tokens[row, : step.lengths[row]], pool)
        buffers.step = step.number
        places = step.place_of_new(kv_heads, buffers.keys.shape[2])
        for kept, new in ((buffers.keys, key), (buffers.values, value)):
            kept.view(-1, head_dim).index_copy_(0, places, step.by_row(new).reshape(-1, head_dim))
        # The query heads of one key head side by side.
        grouped = step.by_row(query).view(batch, kv_heads, -1, head_dim)
        attended = []
        for call in step.calls:
            rows = slice(call.start, call.end)
            key, value = (side[rows, :, : call.width] for side in (buffers.keys, buffers.values))
            attended.append(attend_one(grouped[rows], key, value, call, scale).reshape(-1, *query.shape[1:]))
        output = attended[0] if len(attended) == 1 else torch.cat(attended)
        return output if step.order is None else torch.empty_like(output).index_copy_(0, step.order, output)

    def _fill(self, buffers: LayerBuffers, row: int, tokens: torch.Tensor, pool: Pool) -> None:
        for kept, source in zip((buffers.keys, buffers.values), pool, strict=True):
            kept[row, :, : len(tokens)] = source[tokens].transpose(0, 1)
            kept[row, :, len(tokens) :] = 0

    def _buffers(self, layer_id: int, key: torch.Tensor) -> LayerBuffers:
        """Return the layer's buffers, at first empty."""
        if layer_id not in self._layers:
            rows, capacity = self._tokens.shape
            shape = (rows, key.shape[1], capacity, key.shape[2])
            self._layers[layer_id] = LayerBuffers(key.new_zeros(shape), key.new_zeros(shape), -1)
        return self._layers[layer_id]

    def _reserve(self, rows: int, length: int) -> bool:
        """Make room for ``rows`` of ``length`` positions, by doubling; False when that is more than the limit."""
        had_rows, had_capacity = self._tokens.shape
        if rows <= had_rows and length <= had_capacity:
            return True
        new_rows = max(had_rows, 1 << (rows - 1).bit_length())
        capacity = max(had_capacity, MIN_CAPACITY, 1 << (length - 1).bit_length())
        if new_rows * capacity > self.limit:  # all that there may be, when that is enough
            new_rows = max(had_rows, rows)
            capacity = self.limit // new_rows
            if capacity < max(had_capacity, length):
                return False
        tokens = torch.zeros((new_rows, capacity), dtype=torch.int32)
        tokens[:had_rows, :had_capacity] = self._tokens
        self._tokens = tokens
        for layer in self._layers.values():
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros((new_rows, old.shape[1], capacity, old.shape[3]))
                new[:had_rows, :, :had_capacity] = old
                setattr(layer, name, new)
        return True

    def _drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        last = len(self._requests) - 1
        if row != last:
            self._requests[row], self._lengths[row] = self._requests[last], self._lengths[last]
            self._tokens[row] = self._tokens[last]
            for layer in self._layers.values():
                layer.keys[row] = layer.keys[last]
                layer.values[row] = layer.values[last]
        self._requests.pop()
        self._lengths.pop()


class WorkBuffers:
    """Keys and values of the rows of one call, gathered into memory that is kept: new memory costs more to touch."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self._buffers = (torch.empty(0), torch.empty(0))

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def gather(self, tokens: torch.Tensor, pool: Pool) -> Pool:
        """Return keys and values, [rows, kv_heads, width, head_dim], of tokens [rows, width]; valid until the next."""
        rows, width = tokens.shape
        _, kv_heads, head_dim = pool[0].shape
        index = (tokens[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).view(-1)
        if self._buffers[0].numel() < len(index) * head_dim or self._buffers[0].dtype != pool[0].dtype:
            self._buffers = tuple(side.new_empty(len(index) * head_dim) for side in pool)  # type: ignore[assignment]
        gathered = []
        for side, buffer in zip(pool, self._buffers, strict=True):
            out = buffer[: len(index) * head_dim].view(-1, head_dim)
            torch.index_select(side.view(-1, head_dim), 0, index, out=out)
            gathered.append(out.view(rows, kv_heads, width, head_dim))
        return gathered[0], gathered[1]


class GatheredRows:
    """One query token per sequence, over keys and values that are gathered in every layer.

    For decoding without a mirror, and for prefills that have all tokens but one in the cache.
    """

    def __init__(self, slots: list[int], lengths: list[int], req_to_token: torch.Tensor) -> None:
        """slots: of the requests; lengths: tokens of each, with the new one."""
        order = sorted(range(len(slots)), key=lengths.__getitem__, reverse=True)  # calls of similar lengths
        by_row = [lengths[i] for i in order]
        self._order = torch.tensor(order)
        self._calls = calls_for(by_row)
        tokens = req_to_token[torch.tensor(slots)[self._order], : by_row[0]].to(torch.int64)
        # What is masked must be finite, unless the request itself is not.
        inside = torch.arange(by_row[0]) < torch.tensor(by_row)[:, None]
        self._tokens = torch.where(inside, tokens, tokens[:, :1])

    def attend(self, query: torch.Tensor, pool: Pool, scale: float | None, work: WorkBuffers) -> torch.Tensor:
        """Return the attention output for query, both [sequences, heads, head_dim]."""
        sequences, _, head_dim = query.shape
        grouped = query[self._order].view(sequences, pool[0].shape[1], -1, head_dim)
        output = torch.empty_like(query)
        for call in self._calls:
            key, value = work.gather(self._tokens[call.start : call.end, : call.width], pool)
            attended = attend_one(grouped[call.start : call.end], key, value, call, scale)
            output[self._order[call.start : call.end]] = attended.reshape(call.end - call.start, -1, head_dim)
        return output
