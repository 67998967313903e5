"""Prefill attention of many sequences per call on a CPU.

SGLang's torch-native backend calls attention once per sequence, and pads the queries of a sequence to the length that
it has with its cached prefix: what is cached is computed again and thrown away. Here sequences with equally many new
and cached tokens share a call. Only torch is needed, so that this can be tested without an engine.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from slime_engine_plugin.cpu.kv_mirror import GatheredRows, Pool, WorkBuffers


@dataclass(frozen=True)
class Group:
    """Sequences with ``length`` new tokens each and equally many cached ones.

    tokens: which of the batch's tokens, sequence after sequence; places: [sequences, cached + new] in the KV pool, None
    where nothing is cached; mask: [new, cached + new], additive, None for the usual causal one.
    """

    length: int
    tokens: slice | torch.Tensor
    places: torch.Tensor | None
    mask: torch.Tensor | None


class Prefill:
    """State that all layers of one prefill pass share."""

    def __init__(self, slots: list[int], cached: list[int], new: list[int], req_to_token: torch.Tensor) -> None:
        """slots, cached, new: of each sequence; req_to_token: [slots, context] places in the KV pool."""
        members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        singles = []  # one new token attends to everything: prefixes of any length share calls, as in decoding
        start = 0
        for slot, prefix, length in zip(slots, cached, new, strict=True):
            if length == 1 and prefix:
                singles.append((slot, prefix + 1, start))
            else:
                members[length, prefix].append((slot, start))
            start += length
        self._groups = [_group(*key, entries, req_to_token) for key, entries in members.items()]
        self._rows: GatheredRows | None = None
        if singles:
            single_slots, lengths, starts = (list(column) for column in zip(*singles, strict=True))
            self._rows = GatheredRows(single_slots, lengths, req_to_token)
            self._last_tokens = torch.tensor(starts)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: Pool,
        scale: float | None,
        work: WorkBuffers,
    ) -> torch.Tensor:
        """Return the attention output for query, both [tokens, heads, head_dim].

        key, value: [tokens, kv_heads, head_dim], new; pool: of the layer, to which they have been written.
        """
        heads, head_dim = query.shape[1:]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._rows is not None:
            output[self._last_tokens] = self._rows.attend(query[self._last_tokens], pool, scale, work)
        for group in self._groups:
            if group.places is None:
                keys, values = (side[group.tokens].unflatten(0, (-1, group.length)) for side in (key, value))
            else:
                keys, values = (side[group.places] for side in pool)
            attended = scaled_dot_product_attention(
                query[group.tokens].unflatten(0, (-1, group.length)).transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=None if group.mask is None else group.mask.to(query.dtype),
                is_causal=group.mask is None,
                scale=scale,
                enable_gqa=heads != key.shape[1],
            )
            output[group.tokens] = attended.transpose(1, 2).reshape(-1, heads, head_dim)
        return output


def _group(length: int, prefix: int, entries: list[tuple[int, int]], req_to_token: torch.Tensor) -> Group:
    """Make the group of these sequences: (slot, first of the batch's tokens) of each, in the order of the batch."""
    slots, starts = (list(column) for column in zip(*entries, strict=True))
    if starts[-1] - starts[0] == (len(starts) - 1) * length:  # side by side: slices need no copy
        tokens: slice | torch.Tensor = slice(starts[0], starts[-1] + length)
    else:
        tokens = (torch.tensor(starts)[:, None] + torch.arange(length)).view(-1)
    if prefix == 0:
        return Group(length, tokens, None, None)
    total = prefix + length
    future = torch.arange(total) > torch.arange(prefix, total)[:, None]
    mask = torch.zeros(length, total).masked_fill_(future, -torch.inf)
    return Group(length, tokens, req_to_token[torch.tensor(slots), :total].to(torch.int64), mask)
