"""Megatron's requirements on experts, and on the groups of ranks it makes for them in models without any."""

from __future__ import annotations

import pytest

from slime.arguments import ArgumentError
from tests.support.arguments import dry

FOUR = ("--actor-num-gpus-per-node", 4)
PIPELINE = (*FOUR, "--pipeline-model-parallel-size", 2, "--use-tp-pp-dp-mapping")


def test_experts_of_a_tensor_size_of_their_own():
    assert dry(*FOUR, "--expert-tensor-parallel-size", 2)
    with pytest.raises(
        ArgumentError, match=r"4 training slots .* cannot be divided by --expert-tensor-parallel-size 3"
    ):
        dry(*FOUR, "--expert-tensor-parallel-size", 3)
    with pytest.raises(ArgumentError, match="--expert-tensor-parallel-size 0: at least 1"):
        dry(*FOUR, "--expert-tensor-parallel-size", 0)


def test_the_other_order_of_ranks_needs_experts_divided_like_the_rest():
    assert dry(*PIPELINE).data_parallel_size == 2
    assert dry(*PIPELINE, "--context-parallel-size", 2, "--expert-tensor-parallel-size", 2)
    with pytest.raises(ArgumentError, match="--context-parallel-size 2 = 2 to equal --expert-tensor-parallel-size 1 x"):
        dry(*PIPELINE, "--context-parallel-size", 2)


@pytest.mark.parametrize(("instances", "fits"), [(1, True), (2, True), (4, True), (3, False), (0, False)])
def test_instances_of_the_distributed_optimizer_divide_the_data_parallel_ranks(instances, fits):
    words = (*FOUR, "--num-distributed-optimizer-instances", instances)
    if fits:
        assert dry(*words).num_distributed_optimizer_instances == instances
    else:
        with pytest.raises(ArgumentError, match=f"{instances} must divide the 4 data x context parallel ranks"):
            dry(*words)


def test_one_expert_per_token_needs_the_softmax_before_the_choice():
    words = (
        "--hf-checkpoint",
        "/nowhere/model",
        "--num-experts",
        4,
        "--moe-ffn-hidden-size",
        32,
        "--moe-router-topk",
        1,
    )
    assert dry(*words, "--moe-router-pre-softmax")
    assert dry(*words, "--moe-router-score-function", "sigmoid")
    with pytest.raises(ArgumentError, match="--moe-router-topk 1 needs --moe-router-pre-softmax"):
        dry(*words)
