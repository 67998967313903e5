"""Places of the engine's choices of experts in packed rows, against a loop over places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.packing import pack
from slime.batching.routed_experts import has_successor, rows_of_experts, rows_of_samples

EXPERTS, LAYERS, TOPK = 7, 3, 2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 23), min_size=1, max_size=4),
    cp_size=st.sampled_from([1, 2, 3]),
    tp_size=st.sampled_from([1, 2]),
    seed=st.integers(0, 10**6),
)
def test_every_place_gets_the_experts_of_its_token(lengths: list[int], cp_size: int, tp_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = [torch.randint(EXPERTS, (n - 1, LAYERS, TOPK), generator=generator, dtype=torch.int32) for n in lengths]
    for cp_rank in range(cp_size):
        packed = pack(
            [torch.zeros(n, dtype=torch.long) for n in lengths],
            [1] * len(lengths),
            cp_rank=cp_rank,
            cp_size=cp_size,
            tp_size=tp_size,
            pad_multiplier=8,
        )
        places = packed.tokens.size(1)
        rows = rows_of_samples(lengths, places, cp_rank=cp_rank, cp_size=cp_size)
        followed = has_successor(rows, lengths)
        found = rows_of_experts(experts, rows, [0, 2], num_experts=EXPERTS)
        assert found.shape == (2, places, TOPK)

        token_at = {
            span.start + i: (sample, span.position + i)
            for sample, spans in enumerate(packed.spans)
            for span in spans
            for i in range(span.length)
        }
        unknown = 0
        for place in range(places):
            sample, token = token_at.get(place, (0, lengths[0] - 1))
            assert bool(followed[place]) == (token < lengths[sample] - 1)
            if token < lengths[sample] - 1:
                expected = experts[sample][token, [0, 2]].tolist()
            else:  # the engine said nothing: padding, or a last token
                expected = [[(unknown * TOPK + k) % EXPERTS for k in range(TOPK)]] * 2
                unknown += 1
            assert found[:, place].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_experts_of_any_integer_type(dtype: torch.dtype) -> None:
    rows = rows_of_samples([3], 4, cp_rank=0, cp_size=1)
    found = rows_of_experts([torch.tensor([[[250]], [[3]]]).to(dtype)], rows, [0], num_experts=256)
    assert found.tolist() == [[[250], [3], [0], [1]]]
