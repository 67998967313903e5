"""Packing and context-parallel layouts: every token is on one rank, where its logits are expected."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import cp_utils
from slime.batching.context_parallel import (
    gather_responses,
    logits_and_tokens_offsets,
    response_ranges,
    slice_response_with_cp,
    slice_with_cp,
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


def make_tokens(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Distinct token values, none of them 0, so that a token in the wrong place or padding shows."""
    start, tokens = 1, []
    for total, _ in shapes:
        tokens.append(torch.arange(start, start + total, dtype=torch.int32))
        start += total
    return tokens


def pack_all_ranks(shapes: list[tuple[int, int]], cp_size: int, **kwargs) -> list[PackedMicroBatch]:
    return [
        pack(make_tokens(shapes), [r for _, r in shapes], cp_rank=rank, cp_size=cp_size, **kwargs)
        for rank in range(cp_size)
    ]


def check_pack_and_unpack(shapes: list[tuple[int, int]], cp_size: int, tp_size: int, pad: int) -> None:
    tokens = make_tokens(shapes)
    ranks = pack_all_ranks(shapes, cp_size, tp_size=tp_size, pad_multiplier=pad)

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
        assert length == zigzag_local_length(total, cp_size) * cp_size
    if cp_size > 1:  # the padding segment is zig-zagged too
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

    # the rows whose logits predict response tokens hold the token *before* each of these
    predicting: list[list[torch.Tensor]] = [[] for _ in shapes]
    for rank, packed in enumerate(ranks):
        with mock.patch.object(cp_utils, "context_parallel", lambda rank=rank: Ranks(rank, cp_size)):
            rows, targets, sizes = cp_utils.response_rows_and_targets(
                tokens, [total for total, _ in shapes], [response for _, response in shapes]
            )
        pairs = torch.stack([packed.tokens[0, rows], targets], 1)
        for found, part in zip(predicting, pairs.split(sizes), strict=True):
            found.append(part)
    for sequence, (total, response), parts in zip(tokens, shapes, predicting, strict=True):
        expected = torch.stack([sequence[total - response - 1 : total - 1], sequence[total - response :]], 1)
        assert torch.equal(torch.cat(parts).sort(dim=0).values, expected.long())


@settings(max_examples=60, deadline=None)
@given(samples, cp_sizes, st.sampled_from([1, 2]), st.sampled_from([1, 3, 8, 128]))
def test_packing_loses_and_invents_nothing(shapes, cp_size, tp_size, pad) -> None:
    check_pack_and_unpack(shapes, cp_size, tp_size, pad)


@SOAK
@settings(max_examples=3000, deadline=None)
@given(samples, cp_sizes, st.sampled_from([1, 2]), st.sampled_from([1, 3, 8, 128]))
def test_packing_loses_and_invents_nothing_full(shapes, cp_size, tp_size, pad) -> None:
    check_pack_and_unpack(shapes, cp_size, tp_size, pad)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 8))
def test_zigzag_slices_rejoin(total: int, cp_size: int) -> None:
    sequence = torch.arange(1, total + 1).unsqueeze(1).expand(-1, 2)
    parts = [slice_with_cp(sequence, -1, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    assert {part.size(0) for part in parts} == {zigzag_local_length(total, cp_size)}
    halves = [part.chunk(2) if cp_size > 1 else (part, part[:0]) for part in parts]
    rejoined = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    assert torch.equal(torch.cat(rejoined)[:total], sequence)


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


def test_single_rank_without_padding_has_no_padding_segment() -> None:
    packed = pack([torch.tensor([5, 6, 7])], [1], pad_multiplier=3)
    assert packed.cu_seqlens.tolist() == [0, 3]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.tokens.dtype == torch.int64
    assert math.isclose(packed.max_seqlen, 3)


@pytest.mark.parametrize(
    ("tokens", "responses", "match"),
    [
        ([], [], "at least one sample"),
        ([torch.ones(3)], [3], "sample 0 .* 3 tokens and response length 3"),
        ([torch.ones(3), torch.ones(2)], [1, -1], "sample 1"),
    ],
)
def test_refuses_what_cannot_be_trained(tokens, responses, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack(tokens, responses)


def test_gather_checks_its_input_and_is_the_identity_alone() -> None:
    values = [torch.ones(3)]
    assert gather_responses(values, [3], [((0, 3),)], group=None)[0] is values[0]
    with pytest.raises(ValueError, match=r"sample 0: expected 2 values .* got 3"):
        gather_responses(values, [3], [((0, 2),)], group=None)
    with pytest.raises(ValueError, match="one value per response token"):
        slice_response_with_cp(values[0], 8, 4, cp_rank=0, cp_size=2)
