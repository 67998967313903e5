"""What the trainer refuses where data enters it, whoever made it: the message names the sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from slime.backends.megatron_utils.data import check_shard
from slime.batching.columns import RolloutShard
from tests.support.arguments import run_args
from tests.support.trainer import make_shards, make_train_data

ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
ARGS = run_args(
    vocab_size=256, global_batch_size=8, micro_batch_size=2, use_dynamic_batch_size=False, balance_data=False,
    balance_by_flops=False,
)  # fmt: skip


def shard() -> RolloutShard:
    (made,) = make_shards(ARGS, make_train_data(), ONE_RANK)  # type: ignore[arg-type]
    return made


def put(column: str, value: float) -> Callable[[RolloutShard], None]:
    """Set the first entry of a per-token column of the fourth sample."""

    def spoil(made: RolloutShard) -> None:
        ragged = made.batch.ragged[column]
        ragged.values[ragged.offsets[3]] = value

    return spoil


def number(column: str, value: float) -> Callable[[RolloutShard], None]:
    def spoil(made: RolloutShard) -> None:
        made.batch.numbers[column][3] = value

    return spoil


def test_good_data_passes() -> None:
    check_shard(ARGS, shard())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (put("tokens", 256), "token ids from .* to 256, but --vocab-size is 256"),
        (put("tokens", -1), "token ids from -1 to"),
        (put("loss_masks", 2), "a loss mask with values from 0 to 2|a loss mask with values from 1 to 2"),
        (put("loss_masks", -1), "a loss mask with values from -1"),
        (put("rollout_log_probs", 0.5), r"rollout_log_probs up to 0\.5; a log-prob is at most 0"),
        (put("rollout_log_probs", np.nan), "rollout_log_probs that are not finite"),
        (put("rollout_log_probs", -np.inf), "rollout_log_probs that are not finite"),
        (number("rewards", np.nan), "reward nan after post-processing"),
        (number("rollout_mask_sums", -1), "rollout_mask_sums -1"),
        (number("response_lengths", 0), "loss_masks for 0 response tokens"),
        (number("response_lengths", 10**6), "response length 1000000; need 0 <= response < tokens"),
    ],
)
def test_what_cannot_be_right_is_named(spoil: Callable[[RolloutShard], None], message: str) -> None:
    made = shard()
    spoil(made)
    with pytest.raises(ValueError, match=rf"sample index 103 has .*({message})"):
        check_shard(ARGS, made)  # type: ignore[arg-type]


def test_micro_batches_that_miss_a_sample_are_refused() -> None:
    made = shard()
    made.micro_batch_indices[0] = made.micro_batch_indices[1]
    with pytest.raises(ValueError, match="data-parallel rank 0 has 8 samples, but its micro-batches do not hold every"):
        check_shard(ARGS, made)  # type: ignore[arg-type]
