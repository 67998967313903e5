"""Norms are asked for by the name that a checkpoint has: TransformerEngine's, or that of Megatron's own layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils.checkpoints.torch_dist import rename_to_stored


def tensor(key: str) -> SimpleNamespace:
    return SimpleNamespace(key=key, replica_id=0)


@pytest.mark.parametrize(
    ("local", "stored"),
    [
        ("decoder.layers.mlp.linear_fc1.layer_norm_weight", "decoder.layers.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.self_attention.q_layernorm.weight",
            "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (  # before linear attention
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.0.input_layernorm.weight",
        ),
        (
            "optimizer.state.exp_avg.decoder.layers.3.self_attention.kv_layernorm.weight",
            "optimizer.state.exp_avg.decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ],
)
def test_both_ways(local: str, stored: str) -> None:
    for ours, theirs in ((local, stored), (stored, local)):
        kept, wanted = tensor("decoder.final_layernorm.weight"), tensor(ours)
        request = {"model": {"a": kept, "b": [wanted, 3]}, "step": 1}
        assert rename_to_stored(request, {theirs, kept.key}) == [theirs]
        assert wanted.key == theirs
        assert kept.key == "decoder.final_layernorm.weight"


def test_names_that_the_checkpoint_has_and_those_that_it_lacks_stay() -> None:
    here, nowhere = tensor("layers.pre_mlp_layernorm.weight"), tensor("layers.self_attention.q_layernorm.weight")
    assert rename_to_stored({"model": [here, nowhere]}, {here.key, "layers.mlp.linear_fc1.layer_norm_weight"}) == []
    assert (here.key, nowhere.key) == ("layers.pre_mlp_layernorm.weight", "layers.self_attention.q_layernorm.weight")
