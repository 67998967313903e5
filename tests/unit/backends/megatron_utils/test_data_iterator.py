"""Micro-batches for schedules of a user's own are those of the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.data import DataIterator, build_micro_batch, get_batch, get_data_iterator
from slime.backends.megatron_utils.train.loss import get_rollout_top_p_logprob_kwargs
from slime.batching.ragged_tensor import RaggedTensor
from tests.support.arguments import run_args

SIZES = [(5, 3), (9, 4), (4, 1), (7, 7 - 2)]


def rollout_data() -> dict[str, Any]:
    totals, responses = zip(*SIZES, strict=True)
    return {
        "tokens": RaggedTensor.of([torch.arange(100 * i, 100 * i + total) for i, total in enumerate(totals)]),
        "total_lengths": list(totals),
        "response_lengths": list(responses),
        "loss_masks": RaggedTensor.of([torch.ones(response, dtype=torch.int32) for response in responses]),
        "rewards": [1.0, 2.0, 3.0, 4.0],
        "micro_batch_indices": [[2, 0], [1], [3]],
        "num_microbatches": [2, 1],
    }


def test_the_schedule_of_the_rollout() -> None:
    data = rollout_data()
    iterators, counts = get_data_iterator(run_args(), ["chunk", "chunk"], data)
    assert counts == [2, 1]
    for iterator in iterators:
        for _ in range(2):
            seen = [iterator.get_next(["rewards", "values"]) for _ in range(3)]
            assert seen == [{"rewards": r, "values": None} for r in ([3.0, 1.0], [2.0], [4.0])]
            with pytest.raises(IndexError):
                iterator.get_next(["rewards"])
            assert iterator.reset() is iterator


def test_micro_batches_of_a_size() -> None:
    iterator = DataIterator(rollout_data(), micro_batch_size=2)
    assert [iterator.get_next(["rewards"])["rewards"] for _ in range(2)] == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(IndexError, match="samples 4 to 5: there are fewer"):
        iterator.get_next(["rewards"])
    with pytest.raises(ValueError, match="one of micro_batch_size and micro_batch_indices"):
        DataIterator({})


def test_a_batch_is_packed_as_the_trainer_packs_it() -> None:
    data = rollout_data()
    iterator = DataIterator(data, micro_batch_indices=data["micro_batch_indices"])
    batch = get_batch(iterator, ["tokens", "loss_masks"], pad_multiplier=16)
    expected = build_micro_batch(run_args(data_pad_size_multiplier=16), data, [2, 0])
    assert torch.equal(batch["tokens"], expected["tokens"])
    assert batch["tokens"][0, :9].tolist() == [200, 201, 202, 203, 0, 1, 2, 3, 4]
    assert [tokens.tolist() for tokens in batch["unconcat_tokens"]] == [[200, 201, 202, 203], [0, 1, 2, 3, 4]]
    assert (batch["total_lengths"], batch["response_lengths"]) == ([4, 5], [1, 3])
    assert torch.equal(batch["packed_seq_params"].cu_seqlens_q, expected["packed_seq_params"].cu_seqlens_q)
    with pytest.raises(ValueError, match="qkv_format='bshd'"):
        get_batch(iterator, ["tokens"], qkv_format="bshd")


def test_top_p_masks_are_keywords_of_the_log_probs() -> None:
    masks = {"rollout_top_p_token_ids": [torch.tensor([1])], "rollout_top_p_token_offsets": [torch.tensor([0, 1])]}
    assert get_rollout_top_p_logprob_kwargs(run_args(), {"tokens": []}) == {}
    assert get_rollout_top_p_logprob_kwargs(run_args(), {"tokens": [], **masks}) == {
        "top_p_token_ids": masks["rollout_top_p_token_ids"],
        "top_p_token_offsets": masks["rollout_top_p_token_offsets"],
    }
