"""Decode attention of many sequences at once on a CPU, over copies of keys and values that are kept between steps.

SGLang's torch-native backend gathers the keys and values of each sequence again in every layer of every step, and calls
attention once per sequence. Here every running request has a row in ``[rows, kv_heads, capacity, head_dim]`` buffers,
one pair per layer. A step appends one position to every row and attends over slices of the buffers, a few rows per
call. Only torch is needed, so that the bookkeeping can be tested without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS_PER_CALL = 16
"""Rows of one attention call: enough to be worth a dispatch, few enough for the rows to have similar lengths."""
MIN_CAPACITY = 64
"""Positions of the smallest row; capacity grows by doubling."""


@dataclass
class DecodeStep:
    """What all layers of one decode step share. ``order[row]`` is the position in the batch of the request of a row."""

    number: int
    order: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    lengths: list[int]
    filled: list[int]
    calls: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)
    """(first row, end row, longest length, additive mask [rows, 1, 1, longest length])"""


@dataclass
class LayerBuffers:
    """Keys and values of one layer, [rows, kv_heads, capacity, head_dim], and the last step they have seen."""

    keys: torch.Tensor
    values: torch.Tensor
    step: int


class KVMirror:
    """Rows of the requests that were decoded in the last step.

    A row is used again only when it holds all tokens but the last, at the same places of the KV pool, and the request
    has not been extended since (``forget``). Everything else is copied from the pool, so a row is never stale.
    Positions past a row's length are zero: what is masked must at least be finite.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: positions of all rows together; the size of the KV pool bounds the memory to that of the pool."""
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Give all memory back."""
        self._requests: list[int] = []  # row -> request slot of SGLang
        self._lengths: list[int] = []  # row -> positions that hold keys and values
        self._tokens = torch.zeros((0, 0), dtype=torch.int64)  # [rows, capacity]: places in the KV pool
        self._layers: dict[int, LayerBuffers] = {}
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self._layers.values())

    def forget(self, requests: Iterable[int]) -> None:
        """Drop the rows of these request slots: their keys and values are being rewritten."""
        gone = set(requests)
        for row in reversed(range(len(self._requests))):
            if self._requests[row] in gone:
                self._drop(row)

    def plan(self, requests: list[int], lengths: list[int], req_to_token: torch.Tensor) -> DecodeStep | None:
        """Prepare a decode step; None (and no memory kept) when the rows would exceed the limit.

        requests: slots of the batch; lengths: tokens of each, with the one that this step adds; req_to_token:
        [slots, context] places in the KV pool.
        """
        at = {slot: position for position, slot in enumerate(requests)}
        self.forget([slot for slot in self._requests if slot not in at])
        kept = set(self._requests)
        self._requests += [slot for slot in requests if slot not in kept]
        self._lengths += [0] * (len(requests) - len(kept))
        if not self._reserve(len(requests), max(lengths)):
            self.clear()
            return None
        order = [at[slot] for slot in self._requests]
        by_row = [lengths[position] for position in order]
        longest = max(by_row)
        tokens = req_to_token[torch.tensor(self._requests), :longest].to(torch.int64)
        ends = torch.tensor(by_row)
        inside = torch.arange(longest) < (ends - 1)[:, None]
        same = ((self._tokens[: len(order), :longest] == tokens) | ~inside).all(dim=1).tolist()
        filled = [
            row for row, (length, end) in enumerate(zip(self._lengths, by_row, strict=True))
            if length != end - 1 or not same[row]
        ]  # fmt: skip
        self._tokens[: len(order), :longest] = tokens
        self._lengths = by_row
        self._step += 1
        step = DecodeStep(self._step, torch.tensor(order), ends - 1, tokens, by_row, filled)
        for start in range(0, len(order), ROWS_PER_CALL):
            end = min(start + ROWS_PER_CALL, len(order))
            width = max(by_row[start:end])
            hidden = torch.arange(width) >= ends[start:end, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None, :]
            step.calls.append((start, end, width, mask))
        return step

    def attend(
        self,
        step: DecodeStep,
        layer_id: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        scale: float | None,
    ) -> torch.Tensor:
        """Return the attention output [batch, heads, head_dim].

        query: [batch, heads, head_dim]; key, value: [batch, kv_heads, head_dim] of the new tokens; pool: the layer's
        keys and values, [places, kv_heads, head_dim], to which the new ones have been written.
        """
        batch, kv_heads, head_dim = key.shape
        buffers = self._buffers(layer_id, key)
        missed = buffers.step != step.number - 1
        for row in range(batch) if missed else step.filled:
            self._fill(buffers, row, step.tokens[row, : step.lengths[row]], pool)
        buffers.step = step.number
        rows = torch.arange(batch)
        buffers.keys[rows, :, step.positions] = key[step.order]
        buffers.values[rows, :, step.positions] = value[step.order]
        grouped = query[step.order].view(batch, kv_heads, -1, head_dim)  # the query heads of one key head side by side
        output = torch.empty_like(query)
        for start, end, width, mask in step.calls:
            attended = scaled_dot_product_attention(
                grouped[start:end], buffers.keys[start:end, :, :width], buffers.values[start:end, :, :width],
                attn_mask=mask.to(query.dtype), scale=scale,
            )  # fmt: skip
            output[step.order[start:end]] = attended.reshape(end - start, -1, head_dim)
        return output

    def _fill(
        self, buffers: LayerBuffers, row: int, tokens: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
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
        if new_rows * capacity > self.limit:
            return False
        tokens = torch.zeros((new_rows, capacity), dtype=torch.int64)
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
