"""Parameters counted from flags, against transformers, against published totals and by hand."""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.facts import known_config, models
from slime.models.megatron_flags import megatron_flags
from slime.preflight.plan.model_size import ModelSize, model_size
from tests.support.arguments import known
from tests.support.memory_args import bare_args, meta_parameters

# Totals that the models' publishers and the Hugging Face hub give; tied weights count once.
PUBLISHED = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "GLM-4-9B-0414": 9_400_279_040,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}
# Model types that transformers has no class for: the checkpoints bring their own code.
NOT_IN_TRANSFORMERS = {"mimo", "kimi_k2"}
ONE_OF_EACH = ("llama3.2-3B-Instruct", "qwen2.5-0.5B", "qwen3-0.6B", "qwen3-30B-A3B", "qwen3.5-0.8B", "glm4-9B",
               "glm4.7-30B-A3B", "minimax-m2", "deepseek-v3-5layer", "moonlight")  # fmt: skip


@pytest.fixture(scope="module")
def namespace_of() -> Any:
    """Return a function from a Hugging Face config to the namespace of its Megatron flags."""
    from slime.arguments.command_line import read_words

    flags, parser = known()

    def make(config: dict[str, Any], *more: str) -> Namespace:
        args = Namespace(**{flag.dest: flag.default for flag in flags})
        values, _ = read_words(parser, [*megatron_flags(config), *more], ignore_unknown=False)
        for name, value in values.items():
            setattr(args, name, value)
        return args

    return make


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_totals(name: str, parameters: int, namespace_of: Any) -> None:
    config = known_config(name)
    assert config is not None
    assert model_size(namespace_of(config), config).total == parameters


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_model_of_each_family_equals_transformers(name: str, namespace_of: Any) -> None:
    config = dict(models()[name].config)
    assert model_size(namespace_of(config), config).total == meta_parameters(config)


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [n for n, m in models().items() if m.config["model_type"] not in NOT_IN_TRANSFORMERS and not m.vision]
)
def test_every_known_model_equals_transformers(name: str, namespace_of: Any) -> None:
    config = dict(models()[name].config)
    assert model_size(namespace_of(config), config).total == meta_parameters(config)


def _random_config(family: str, seed: int) -> dict[str, Any]:
    """A small config of the family with every size drawn at random."""
    draw = random.Random(seed)
    groups, ratio = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    config: dict[str, Any] = {
        "model_type": family, "num_hidden_layers": draw.randint(2, 5), "hidden_size": 8 * draw.randint(2, 12),
        "intermediate_size": draw.randint(10, 90), "num_attention_heads": groups * ratio,
        "num_key_value_heads": groups, "head_dim": 2 * draw.randint(2, 12), "vocab_size": draw.randint(50, 900),
        "tie_word_embeddings": draw.random() < 0.5, "attention_bias": False, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "qwen3_moe":
        config |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": draw.randint(5, 30),
                   "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    if family in ("deepseek_v3", "glm4_moe"):
        config |= {"n_routed_experts": 6, "n_shared_experts": draw.choice([1, 2]), "num_experts_per_tok": 2,
                   "moe_intermediate_size": draw.randint(5, 30), "first_k_dense_replace": 1, "n_group": 1,
                   "topk_group": 1, "routed_scaling_factor": 1.0}  # fmt: skip
    if family == "glm4_moe":
        config |= {"use_qk_norm": draw.random() < 0.5, "attention_bias": True}
    if family == "deepseek_v3":
        config |= {"q_lora_rank": draw.choice([None, 12]), "kv_lora_rank": 10, "qk_nope_head_dim": 6,
                   "qk_rope_head_dim": 4, "v_head_dim": draw.choice([5, 6]), "head_dim": 4,
                   "num_key_value_heads": groups * ratio, "tie_word_embeddings": False}  # fmt: skip
    return config


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_random_sizes_equal_transformers(family: str, seed: int, namespace_of: Any) -> None:
    config = _random_config(family, seed)
    if family == "qwen2":  # its heads always share the hidden size
        config["hidden_size"] = config["head_dim"] * config["num_attention_heads"]
    assert model_size(namespace_of(config), config).total == meta_parameters(config)


def test_parts_by_hand() -> None:
    size = model_size(bare_args(qk_layernorm=True, actor_num_gpus_per_node=1))
    # per layer: query 8 x 16, key and value 4 x 16 each, output; gate, up, down; two norms and those of a head's size
    attention = 64 * (128 + 2 * 64) + 128 * 64
    assert dict(size.parts) == {
        "embedding": 1024 * 64,
        "attention": 4 * attention,
        "dense MLP": 4 * 3 * 64 * 160,
        "experts": 0,
        "norms": 4 * (2 * 64 + 2 * 16) + 64,
        "output": 1024 * 64,
        "vision tower": 0,
    }
    assert size.total == size.active + 1024 * 64  # looking a row up is no work


def test_biases_norm_vectors_and_learned_positions() -> None:
    plain = {"group_query_attention": False, "actor_num_gpus_per_node": 1}
    rotary = model_size(bare_args(**plain)).total
    other = bare_args(
        normalization="LayerNorm", add_bias_linear=True, position_embedding_type="learned_absolute",
        max_position_embeddings=100, **plain,
    )  # fmt: skip
    norms, biases = 4 * 2 * 64 + 64, 4 * (3 * 128 + 64 + 2 * 160 + 64)
    assert model_size(other).total == rotary + norms + biases + 100 * 64
    assert model_size(bare_args(add_qkv_bias=True, **plain)).total == rotary + 4 * 3 * 128


def test_plain_mlp_has_no_gate() -> None:
    gated, plain = (model_size(bare_args(swiglu=swiglu)).parts["dense MLP"] for swiglu in (True, False))
    assert (gated, plain) == (4 * 3 * 64 * 160, 4 * 2 * 64 * 160)


MOE = {
    "num_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 48,
    "moe_shared_expert_gate": True, "moe_layer_freq": [0, 1, 1, 1],
}  # fmt: skip


def test_experts_by_hand() -> None:
    size = model_size(bare_args(**MOE))
    expert, shared, router = 3 * 64 * 32, 3 * 64 * 48 + 64, 8 * 64
    assert size.parts["experts"] == 3 * (8 * expert + shared + router)
    assert size.parts["dense MLP"] == 3 * 64 * 160
    assert size.active == size.total - 1024 * 64 - 3 * 6 * expert


@pytest.mark.parametrize(("frequency", "layers"), [(1, 4), (2, 2), (3, 2), ([1, 0, 0, 1], 2)])
def test_which_layers_have_experts(frequency: Any, layers: int) -> None:
    size = model_size(bare_args(**{**MOE, "moe_layer_freq": frequency}))
    assert sum(kind.moe for kind in size.shape.kinds) == layers


def test_linear_attention_from_flags() -> None:
    size = model_size(
        bare_args(
            linear_attention_freq=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_conv_kernel_dim=4,
        )
    )
    assert [kind.linear for kind in size.shape.kinds] == [True, False, True, False]
    keys, values = 2 * 8, 4 * 16
    delta = 64 * (2 * keys + 2 * values + 2 * 4) + 4 * (2 * keys + values) + 2 * 4 + values * 64
    softmax = 64 * (128 + 2 * 64) + 128 * 64
    assert size.parts["attention"] == 2 * delta + 2 * softmax


def test_says_what_no_flag_describes() -> None:
    hybrid = bare_args(spec=["slime_plugins.models.qwen3_next", "get_qwen3_next_spec"])
    assert "linear-attention layers are counted as softmax attention" in model_size(hybrid).shape.remarks[0]
    sparse = bare_args(spec=["slime_plugins.models.glm5.glm5", "get_glm5_spec"])
    assert "indexer" in model_size(sparse).shape.remarks[0]
    gemma = bare_args(spec=["slime_plugins.models.gemma3", "get_gemma3_model_provider"])
    assert "counted as attending to all tokens: no flag" in model_size(gemma).shape.remarks[0]
    assert "--window-size" in model_size(bare_args(window_size=[127, 0])).shape.remarks[0]


def test_the_indexer_is_in_the_layers_that_select() -> None:
    """In all four layers, or in the first and the third; whole on each tensor-parallel rank."""
    latent = {
        "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    config = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8, "num_hidden_layers": 4}
    indexer = 24 * 8 * 16 + 64 * 16 + 64 * 8 + 2 * 16
    without = model_size(bare_args(**latent))
    for number, fields in ((4, {}), (2, {"index_topk_freq": 2, "index_skip_topk_offset": 1})):
        size = model_size(bare_args(**latent), {**config, **fields})
        assert size.total - without.total == number * indexer
        assert sum(size.ranks[0].parts.values()) - sum(without.ranks[0].parts.values()) == number * indexer
        assert not size.shape.remarks


def test_multi_token_prediction_adds_a_layer_and_a_projection() -> None:
    with_mtp, without = model_size(bare_args(mtp_num_layers=1)), model_size(bare_args())
    layer = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 160 + 2 * 64
    assert with_mtp.total - without.total == layer + 2 * 64 * 64 + 3 * 64
    staged = model_size(bare_args(mtp_num_layers=1, pipeline_model_parallel_size=2))
    assert staged.ranks[1].parts["embedding"] == 0  # it is lent to the last stage, which embeds the token further on


def test_vocabulary_is_padded_on_ranks_only() -> None:
    size = model_size(bare_args(vocab_size=1000, tensor_model_parallel_size=2))
    assert size.parts["embedding"] == 1000 * 64
    assert size.ranks[0].parts["embedding"] == 1024 // 2 * 64


def _layers(size: ModelSize) -> list[list[list[int]]]:
    return [[list(chunk.layers) for chunk in rank.chunks] for rank in size.ranks]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"pipeline_model_parallel_size": 2}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3}, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        (
            {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1,
             "decoder_last_pipeline_num_layers": 3},
            [[[0]], [[1, 2]], [[3, 4]], [[5, 6, 7]]],
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
        ),
        (
            {"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True,
             "account_for_loss_in_pipeline_split": True},
            [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t*2|(tt|)*1tttL"},
            [[[0], [3, 4]], [[1, 2], [5, 6, 7]]],
        ),
    ],
)  # fmt: skip
def test_layers_of_pipeline_ranks(flags: dict[str, Any], expected: Any) -> None:
    args = bare_args(num_layers=8, **flags)
    assert _layers(model_size(args)) == expected


def test_layers_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(ValueError, match="4 layers cannot be spread over 3 pipeline stages"):
        model_size(bare_args(pipeline_model_parallel_size=3, actor_num_gpus_per_node=6))


def test_a_model_that_is_not_described_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers missing"):
        model_size(bare_args(num_layers=None))


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]), untied=st.booleans(), latent=st.booleans(),
)  # fmt: skip
def test_ranks_together_hold_the_whole_model(tp: int, pp: int, ep: int, etp: int, untied: bool, latent: bool) -> None:
    """Parts that are divided add up to the whole; those that every tensor-parallel rank has are there tp times."""
    args = bare_args(
        **{**MOE, "moe_layer_freq": 2}, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, actor_num_gpus_per_node=64,
        untie_embeddings_and_output_weights=untied, multi_latent_attention=latent, q_lora_rank=16, kv_lora_rank=32,
        qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    size = model_size(args)
    held = {part: sum(rank.parts[part] for rank in size.ranks) for part in size.parts}
    assert held["dense MLP"] * tp == size.parts["dense MLP"]
    assert held["embedding"] * tp == size.parts["embedding"]
    assert held["norms"] == size.parts["norms"]
    copies = 1024 * 64 if untied or pp > 1 else 0
    assert held["output"] * tp == copies
    down = 4 * 64 * (16 + 32 + 8) if latent else 0
    assert (held["attention"] - down) * tp == size.parts["attention"] - down
    experts = 2 * 8 * 3 * 64 * 32
    router = 2 * (8 * 64 + 64)
    shared = 2 * 3 * 64 * 48
    assert held["experts"] == experts // (ep * etp) + router + shared // tp


def test_buffers_are_padded() -> None:
    """Every tensor begins at a multiple of 64 elements, every buffer ends at one of 128 and of the ranks sharing it."""
    size = model_size(bare_args(num_layers=1, hidden_size=10, ffn_hidden_size=7, vocab_size=128, kv_channels=2,
                                actor_num_gpus_per_node=3))  # fmt: skip
    tensors = [1280, 1280, 10, 10, 10, 10 * (16 + 2 * 8), 16 * 10, 10 * 14, 7 * 10]
    padded = sum(-(-n // 64) * 64 for n in tensors)
    assert size.ranks[0].total == sum(tensors)
    assert size.ranks[0].dense_buffer == -(-padded // 384) * 384
