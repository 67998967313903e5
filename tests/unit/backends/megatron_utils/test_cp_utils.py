"""Context-parallel helpers against a brute-force account of who holds which position."""

from __future__ import annotations

import math

import pytest
import torch

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import cp_utils

SAMPLES = [(13, 5), (8, 7), (3, 1), (21, 20), (6, 2)]  # (total, response)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch):
    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(cp_utils, "context_parallel", lambda: Ranks(rank, size, None))

    return become


def held_positions(total: int, rank: int, size: int) -> list[int]:
    """Positions of a sequence on a rank, in the order of its row; None of them is padding."""
    if size == 1:
        return list(range(total))
    chunk = math.ceil(total / (2 * size))
    chunks = [list(range(i * chunk, (i + 1) * chunk)) for i in range(2 * size)]
    return chunks[rank] + chunks[2 * size - 1 - rank]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_and_targets(as_rank, size: int) -> None:
    tokens = [torch.arange(total) + 100 * i for i, (total, _) in enumerate(SAMPLES)]
    totals, responses = zip(*SAMPLES, strict=True)
    seen: list[list[int]] = [[] for _ in SAMPLES]
    for rank in range(size):
        as_rank(rank, size)
        row_of = [(i, p) for i, total in enumerate(totals) for p in held_positions(total, rank, size)]
        rows, targets, sizes = cp_utils.response_rows_and_targets(tokens, totals, responses)
        assert sum(sizes) == len(rows) == len(targets)
        for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
            sample, position = row_of[row]
            assert target == 100 * sample + position + 1  # the logits of a position predict the next token
            assert totals[sample] - responses[sample] <= position + 1 < totals[sample]
            seen[sample].append(position + 1)
    for i, (total, response) in enumerate(SAMPLES):
        assert sorted(seen[i]) == list(range(total - response, total))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_lists_and_tensors_agree_and_cover_everything(as_rank, size: int) -> None:
    for total, response in SAMPLES:
        values = torch.arange(response, dtype=torch.float32)
        parts: list[float] = []
        for rank in range(size):
            as_rank(rank, size)
            local = cp_utils.slice_log_prob_with_cp(values, total, response)
            assert cp_utils.slice_log_prob_with_cp(values.tolist(), total, response) == local.tolist()
            held = held_positions(total, rank, size)
            assert local.tolist() == [p + 1 - (total - response) for p in held if total - response <= p + 1 < total]
            parts += local.tolist()
        assert sorted(parts) == values.tolist()


def test_wrong_length_is_refused(as_rank) -> None:
    as_rank(0, 2)
    with pytest.raises(ValueError, match="4"):
        cp_utils.slice_log_prob_with_cp([0.0] * 4, 10, 5)
    with pytest.raises(ValueError, match="5"):
        cp_utils.slice_log_prob_with_cp(torch.zeros(4), 10, 5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_rollout_sums", [False, True])
def test_reducer_is_the_masked_sum_over_ranks(as_rank, size: int, per_token: bool, with_rollout_sums: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    totals, responses = zip(*SAMPLES, strict=True)
    masks = [torch.randint(0, 2, (r,), generator=generator) for r in responses]
    masks[2] = torch.zeros(1, dtype=torch.long)  # nothing trained: denominator 0 counts as 1
    values = [torch.randn(r, generator=generator) for r in responses]
    rollout_sums = torch.tensor([9.0, 9.0, 0.0, 11.0, 11.0]) if with_rollout_sums else None
    expected = 0.0
    for i, (mask, value) in enumerate(zip(masks, values, strict=True)):
        denominator = 1.0 if per_token else max(float(rollout_sums[i] if with_rollout_sums else mask.sum()), 1.0)
        expected += float((mask * value).sum()) / denominator
    got = 0.0
    for rank in range(size):
        as_rank(rank, size)
        reduce = cp_utils.get_sum_of_sample_mean(totals, responses, masks, per_token, sample_denoms=rollout_sums)
        local = [cp_utils.slice_log_prob_with_cp(v, t, r) for v, t, r in zip(values, totals, responses, strict=True)]
        got += float(reduce(torch.cat(local)))
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("by_position", "expected"),
    [
        ((), (1 + 3) / 2 + 7),
        ((False, "thd", None), (1 + 3) / 2 + 7),
        ((True, "thd"), 11.0),
        # slime's main branch: denominators come first, and may be left to the masks
        (([4.0, 8.0],), (1 + 3) / 4 + 7 / 8),
        ((torch.tensor([4.0, 8.0]),), (1 + 3) / 4 + 7 / 8),
        ((torch.tensor([4, 8]), False, "thd", [9, 9]), (1 + 3) / 4 + 7 / 8),
        ((torch.tensor([4.0, 8.0]), True), 11.0),
        ((None, False), (1 + 3) / 2 + 7),
        ((None, True, "thd", None), 11.0),
    ],
)
def test_reducer_by_position_as_both_forms_of_it_are_called(by_position: tuple, expected: float) -> None:
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    reduce = cp_utils.get_sum_of_sample_mean([5, 2], [3, 1], masks, *by_position)
    assert float(reduce(torch.tensor([1.0, 100.0, 3.0, 7.0]))) == pytest.approx(expected)


def test_reducer_refuses_padded_rows_in_both_forms() -> None:
    for by_position in ((False, "bshd"), ([4.0], False, "bshd"), ([4.0], "bshd")):
        with pytest.raises(ValueError, match="qkv_format='bshd'"):
            cp_utils.get_sum_of_sample_mean([4], [3], [torch.ones(3)], *by_position)


def test_reducer_refuses_values_of_another_length() -> None:
    reduce = cp_utils.get_sum_of_sample_mean([4], [3], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"\(3,\)"):
        reduce(torch.zeros(4))
