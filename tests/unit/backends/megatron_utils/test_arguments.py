from __future__ import annotations

from argparse import Namespace

import pytest

from slime.backends.megatron_utils.arguments import set_default_megatron_args


def test_an_empty_namespace_is_filled() -> None:
    args = set_default_megatron_args(Namespace(hf_checkpoint="/model"))
    expected = {
        "use_distributed_optimizer": True,
        "bf16": True,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "rope_type": "rope",
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "/model",
        "use_persistent_ckpt_worker": True,
        "ckpt_assume_constant_structure": True,
        "ckpt_fully_parallel_load": True,
        "dist_ckpt_save_pre_mcore_014": True,
        "enable_gloo_process_groups": True,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_what_was_given_stays() -> None:
    given = {
        "fp16": True, "seq_length": 8192, "max_position_embeddings": 32768, "multi_latent_attention": True,
        "rope_type": "rope", "tokenizer_model": "/tokenizer", "tokenizer_type": None, "padded_vocab_size": 1000,
        "vocab_size": 999, "enable_gloo_process_groups": False,
    }  # fmt: skip
    args = set_default_megatron_args(Namespace(**given))
    assert {name: getattr(args, name) for name in given} == given
    assert args.bf16 is False


def test_latent_attention_rotates_with_yarn() -> None:
    assert set_default_megatron_args(Namespace(multi_latent_attention=True)).rope_type == "yarn"


@pytest.mark.parametrize(("divisor", "tensor", "padded"), [(None, None, 151_936), (128, 8, 152_576), (1, 1, 151_936)])
def test_vocabularies_are_padded(divisor: int | None, tensor: int | None, padded: int) -> None:
    """151936 = 1187 x 128; the next multiple of 8 x 128 = 1024 is 149 x 1024 = 152576."""
    args = Namespace(vocab_size=151_936, make_vocab_size_divisible_by=divisor, tensor_model_parallel_size=tensor)
    assert set_default_megatron_args(args).padded_vocab_size == padded


def test_the_dispatcher_that_cannot_take_different_lengths_is_replaced() -> None:
    assert set_default_megatron_args(Namespace(moe_token_dispatcher_type="allgather")).moe_token_dispatcher_type == (
        "alltoall"
    )
    assert set_default_megatron_args(Namespace(moe_token_dispatcher_type="flex")).moe_token_dispatcher_type == "flex"
