"""Packing and context-parallel layouts: what is packed comes back, on every rank and in every layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.context_parallel import (
    gather_responses,
    logits_and_tokens_offsets,
    response_ranges,
    slice_response,
    slice_response_with_cp,
    slice_with_cp,
    unslice_with_cp,
    zigzag_local_length,
)
from slime.batching.packing import PackedMicroBatch, pack

SOAK = pytest.mark.soak

samples = st.lists(
    st.integers(1, 40).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total - 1))),
    min_size=1,
    max_size=8,
)
cp_sizes = st.sampled_from([1, 2, 4])
layouts = st.sampled_from(["zigzag", "contiguous"])


def make_tokens(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Distinct token values, none of them 0, so that a token in the wrong place or padding shows."""
    start, tokens = 1, []
    for total, _ in shapes:
        tokens.append(torch.arange(start, start + total, dtype=torch.int32))
        start += total
    return tokens


def pack_all_ranks(shapes: list[tuple[int, int]], cp_size: int, layout: str, **kwargs) -> list[PackedMicroBatch]:
    return [
        pack(make_tokens(shapes), [r for _, r in shapes], cp_rank=rank, cp_size=cp_size, layout=layout, **kwargs)
        for rank in range(cp_size)
    ]


def check_pack_and_unpack(shapes: list[tuple[int, int]], cp_size: int, layout: str, tp_size: int, pad: int) -> None:
    tokens = make_tokens(shapes)
    ranks = pack_all_ranks(shapes, cp_size, layout, tp_size=tp_size, pad_multiplier=pad)

    # every rank holds rows of one length, a multiple of what sequence parallelism splits it into
    (local,) = {packed.tokens.size(1) for packed in ranks}
    assert local % (tp_size * pad) == 0
    cu = ranks[0].cu_seqlens.tolist()
    assert cu[0] == 0
    assert cu[-1] == local * cp_size
    lengths = [b - a for a, b in itertools.pairwise(cu)]
    assert ranks[0].max_seqlen == max(lengths)
    assert all(length > 0 for length in lengths)
    for length, (total, _) in zip(lengths, shapes, strict=False):
        assert length == total if layout == "contiguous" else length == zigzag_local_length(total, cp_size) * cp_size
        assert layout == "contiguous" or cp_size == 1 or length % (2 * cp_size) == 0
    if layout == "zigzag" and cp_size > 1:  # the padding segment is zig-zagged too
        assert all(length % (2 * cp_size) == 0 for length in lengths)

    # the spans of all ranks cover every sequence exactly once, and hold its tokens
    for i, sequence in enumerate(tokens):
        restored = torch.zeros_like(sequence)
        for packed in ranks:
            for span in packed.spans[i]:
                part = restored[span.position : span.position + span.length]
                assert (part == 0).all(), "held twice"
                part.copy_(packed.tokens[0, span.start : span.start + span.length])
        assert torch.equal(restored, sequence)
    held = sum(span.length for packed in ranks for spans in packed.spans for span in spans)
    assert sum(int((packed.tokens != 0).sum()) for packed in ranks) == held  # all else is padding

    # a row value that encodes its own token: the logits index must find the token *before* each response token
    for i, (total, response) in enumerate(shapes):
        restored = torch.zeros(response, dtype=torch.long)
        for packed in ranks:
            local_values = packed.split_responses(packed.tokens[0][packed.logits_index])[i]
            ranges = packed.response_ranges[i]
            assert sum(end - start for start, end in ranges) == packed.response_sizes[i] == local_values.numel()
            restored[torch.cat([torch.arange(a, b) for a, b in ranges] or [torch.empty(0, dtype=torch.long)])] = (
                local_values
            )
        assert torch.equal(restored, tokens[i][total - response - 1 : total - 1].long())


@settings(max_examples=60, deadline=None)
@given(samples, cp_sizes, layouts, st.sampled_from([1, 2]), st.sampled_from([1, 3, 8, 128]))
def test_packing_loses_and_invents_nothing(shapes, cp_size, layout, tp_size, pad) -> None:
    check_pack_and_unpack(shapes, cp_size, layout, tp_size, pad)


@SOAK
@settings(max_examples=3000, deadline=None)
@given(samples, cp_sizes, layouts, st.sampled_from([1, 2]), st.sampled_from([1, 3, 8, 128]))
def test_packing_loses_and_invents_nothing_full(shapes, cp_size, layout, tp_size, pad) -> None:
    check_pack_and_unpack(shapes, cp_size, layout, tp_size, pad)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 8))
def test_zigzag_slices_rejoin(total: int, cp_size: int) -> None:
    sequence = torch.arange(1, total + 1).unsqueeze(1).expand(-1, 2)
    parts = [slice_with_cp(sequence, -1, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    assert {part.size(0) for part in parts} == {zigzag_local_length(total, cp_size)}
    assert torch.equal(unslice_with_cp(parts, total), sequence)


def test_zigzag_by_hand() -> None:
    # 7 tokens on 2 ranks: chunks of 2, padded to 8. Rank 0: positions 0,1 and 6,7; rank 1: 2,3 and 4,5.
    sequence = torch.arange(10, 17)
    assert slice_with_cp(sequence, 0, cp_rank=0, cp_size=2).tolist() == [10, 11, 16, 0]
    assert slice_with_cp(sequence, 0, cp_rank=1, cp_size=2).tolist() == [12, 13, 14, 15]
    # response of 4 (positions 3..6) is predicted at positions 2..5: all on rank 1
    assert logits_and_tokens_offsets(7, 4, cp_rank=0, cp_size=2) == (
        2,
        ((0, 2), (6, 8)),
        ((0, 0), (0, 0)),
        ((0, 0),) * 2,
    )
    assert logits_and_tokens_offsets(7, 4, cp_rank=1, cp_size=2) == (
        2,
        ((2, 4), (4, 6)),
        ((2, 4), (4, 6)),
        ((3, 5), (5, 7)),
    )
    assert response_ranges(7, 4, cp_rank=0, cp_size=2) == ()
    assert response_ranges(7, 4, cp_rank=1, cp_size=2) == ((0, 2), (2, 4))


def test_padding_segment_is_even_per_rank_under_context_parallelism() -> None:
    # 2 local tokens and an alignment of 3 would leave a padding of 1, which two chunks cannot share
    packed = pack([torch.tensor([1, 2, 3])], [1], cp_rank=1, cp_size=2, pad_multiplier=3)
    assert packed.tokens.tolist() == [[2, 3, 0, 0, 0, 0]]
    assert packed.cu_seqlens.tolist() == [0, 4, 12]


def test_contiguous_by_hand() -> None:
    packed = pack_all_ranks([(5, 2), (4, 3)], 2, "contiguous", pad_multiplier=6)  # 9 tokens -> 12, 6 per rank
    assert packed[0].tokens.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert packed[1].tokens.tolist() == [[7, 8, 9, 0, 0, 0]]
    assert packed[0].cu_seqlens.tolist() == [0, 5, 9, 12]
    assert packed[0].logits_index.tolist() == [2, 3, 5]  # the second sample's first response token is predicted here
    assert packed[1].logits_index.tolist() == [0, 1]
    assert packed[1].response_ranges == ((), ((1, 3),))


@settings(max_examples=40, deadline=None)
@given(samples, cp_sizes)
def test_response_slices_match_the_packed_row(shapes: list[tuple[int, int]], cp_size: int) -> None:
    for rank, packed in enumerate(pack_all_ranks(shapes, cp_size, "zigzag", pad_multiplier=1)):
        for i, (total, response) in enumerate(shapes):
            values = torch.arange(float(response))
            by_length = slice_response_with_cp(values, total, response, cp_rank=rank, cp_size=cp_size)
            assert torch.equal(by_length, slice_response(values, packed.response_ranges[i]))
            assert by_length.numel() == packed.response_sizes[i]


@settings(max_examples=40, deadline=None)
@given(samples, cp_sizes, layouts, st.randoms(use_true_random=False))
def test_loss_mask_lies_on_the_predicting_logits(shapes, cp_size, layout, rng) -> None:
    masks = [torch.tensor([rng.randint(0, 1) for _ in range(response)], dtype=torch.uint8) for _, response in shapes]
    tokens, total_mask = make_tokens(shapes), 0.0
    for rank in range(cp_size):
        packed = pack(
            tokens, [r for _, r in shapes], masks, cp_rank=rank, cp_size=cp_size, layout=layout, pad_multiplier=4
        )
        assert packed.loss_mask.shape == packed.tokens.shape
        total_mask += float(packed.loss_mask.sum())
        on_row = packed.split_responses(packed.loss_mask[0][packed.logits_index])
        for i, mask in enumerate(masks):
            assert torch.equal(on_row[i], slice_response(mask.float(), packed.response_ranges[i]))
    assert total_mask == sum(int(mask.sum()) for mask in masks)


def test_single_rank_without_padding_has_no_padding_segment() -> None:
    packed = pack([torch.tensor([5, 6, 7])], [1], pad_multiplier=3)
    assert packed.cu_seqlens.tolist() == [0, 3]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.tokens.dtype == torch.int64
    assert math.isclose(packed.max_seqlen, 3)


@pytest.mark.parametrize(
    ("tokens", "responses", "masks", "match"),
    [
        ([], [], None, "at least one sample"),
        ([torch.ones(3)], [3], None, "sample 0 .* 3 tokens and response length 3"),
        ([torch.ones(3), torch.ones(2)], [1, -1], None, "sample 1"),
        ([torch.ones(3)], [2], [torch.ones(1)], "loss mask has 1 entries, response 2"),
    ],
)
def test_refuses_what_cannot_be_trained(tokens, responses, masks, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack(tokens, responses, masks)


def test_gather_checks_its_input_and_is_the_identity_alone() -> None:
    values = [torch.ones(3)]
    assert gather_responses(values, [3], [((0, 3),)], group=None)[0] is values[0]
    with pytest.raises(ValueError, match=r"sample 0: expected 2 values .* got 3"):
        gather_responses(values, [3], [((0, 2),)], group=None)
    with pytest.raises(ValueError, match="one value per response token"):
        slice_response_with_cp(values[0], 8, 4, cp_rank=0, cp_size=2)
