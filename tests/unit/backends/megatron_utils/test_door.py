"""Data that the trainer refuses on entry: the message names the sample."""

from __future__ import annotations

import pytest

from slime.backends.megatron_utils.train.data import check_shard
from slime.batching.columns import RolloutShard
from tests.support.arguments import run_args
from tests.support.trainer import make_shards, make_train_data

ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
ARGS = run_args(
    vocab_size=256, global_batch_size=8, micro_batch_size=2, use_dynamic_batch_size=False, balance_data=False,
    balance_by_flops=False,
)  # fmt: skip


def shard() -> RolloutShard:
    (made,) = make_shards(ARGS, make_train_data(), ONE_RANK)
    return made


def test_good_data_passes() -> None:
    check_shard(ARGS, shard())


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    made = shard()
    tokens = made.batch.ragged["tokens"]
    tokens.values[tokens.offsets[3] + 1] = 256
    message = r"sample index=103 .* tokens\[1\] is 256, expected less than --vocab-size 256; is the rollout's tokenizer"
    with pytest.raises(ValueError, match=message):
        check_shard(ARGS, made)
