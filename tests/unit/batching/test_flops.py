"""FLOPs against a count over every matrix multiplication of the model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.batching.flops import flops_model, forward_flops, moe_layer_pattern


def matmul(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def dense_args(**flags) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "num_layers": 3,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 8,
            "ffn_hidden_size": 40,
            "swiglu": True,
            "vocab_size": 100,
            **flags,
        }
    )


def attention(length: int) -> float:
    """Scores and values of 4 heads of 8, of which a causal mask needs half."""
    return 4 * (matmul(length, 8, length) + matmul(length, length, 8)) / 2


def test_dense_model() -> None:
    length = 7
    layer = (
        matmul(length, 16, 4 * 8)  # query
        + 2 * matmul(length, 16, 2 * 8)  # key, value
        + attention(length)
        + matmul(length, 4 * 8, 16)  # output
        + 2 * matmul(length, 16, 40)  # gate, up
        + matmul(length, 40, 16)  # down
    )
    assert flops_model(dense_args()).forward([length])[0] == 3 * layer + matmul(length, 16, 100)


def test_sums_over_sequences_not_over_their_concatenation() -> None:
    args = dense_args()
    assert forward_flops(args, [3, 4]) == forward_flops(args, [3]) + forward_flops(args, [4])
    assert forward_flops(args, [7]) > forward_flops(args, [3, 4])  # attention is quadratic


def test_without_grouping_and_without_gate() -> None:
    args = dense_args(
        group_query_attention=False, num_query_groups=1, swiglu=False, num_layers=1, padded_vocab_size=128
    )
    length = 5
    expected = (
        3 * matmul(length, 16, 32) + attention(length) + matmul(length, 32, 16) + 2 * matmul(length, 16, 40)
        + matmul(length, 16, 128)
    )  # fmt: skip
    assert forward_flops(args, [length]) == expected


def test_experts_in_the_layers_that_have_them() -> None:
    moe = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 10, "moe_shared_expert_intermediate_size": 12}
    length = 5
    dense_layer = forward_flops(dense_args(num_layers=2), [length]) - forward_flops(dense_args(num_layers=1), [length])
    one = forward_flops(dense_args(num_layers=3, moe_layer_freq=[0, 1, 0], **moe), [length])
    all_dense = forward_flops(dense_args(num_layers=3), [length])
    assert dense_layer > 0
    assert all_dense - one == 3 * matmul(length, 16, 40) - 3 * matmul(length, 16, 2 * 10 + 12)


def test_multi_latent_attention() -> None:
    args = dense_args(
        num_layers=1,
        multi_latent_attention=True,
        q_lora_rank=6,
        kv_lora_rank=5,
        qk_head_dim=8,
        qk_pos_emb_head_dim=2,
        v_head_dim=7,
    )
    length = 3
    expected = (
        matmul(length, 16, 6)  # query down
        + matmul(length, 6, 4 * 10)  # query up
        + matmul(length, 16, 5 + 2)  # key/value down, with the shared rotary key
        + matmul(length, 5, 4 * (8 + 7))  # key/value up
        + 4 * (matmul(length, 10, length) + matmul(length, length, 7)) / 2
        + matmul(length, 4 * 7, 16)
        + 3 * matmul(length, 16, 40)
        + matmul(length, 16, 100)
    )
    assert forward_flops(args, [length]) == expected


def test_layer_pattern() -> None:
    assert moe_layer_pattern(2, 5) == [1, 0, 1, 0, 1]
    assert moe_layer_pattern([0, 1, 1], 3) == [0, 1, 1]
    with pytest.raises(ValueError, match="2 entries for 3 layers"):
        moe_layer_pattern([0, 1], 3)
