"""Rules of the families that mix gated delta nets (linear attention) with gated attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.weights.layouts import Dims, QueryKeyValue, Replicated, Shape
from slime.backends.megatron_utils.weights.maps.dense import DENSE, QK_NORM, layer_rule, qkv_names
from slime.backends.megatron_utils.weights.maps.mtp import mtp_rules
from slime.backends.megatron_utils.weights.maps.rule import MTPLayers, Rule


class GatedQueryKeyValue(QueryKeyValue):
    """As ``QueryKeyValue``, with a gate on attention's output next to every query.

    Hugging Face has them in ``q_proj``, per head ``d`` rows of the query above ``d`` rows of the gate; Megatron has per
    group the queries of all its heads, then their gates, then key and value.
    """

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        q, k, v = super().hf_shapes(local, tp_size, dims)
        return [(2 * q[0], *q[1:]), k, v]

    def _interleave(self, qkv: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        q, k, v = qkv
        heads = q.reshape(-1, dims.heads_per_group, 2, dims.kv_channels, *q.shape[1:])
        return super()._interleave([heads.transpose(1, 2).reshape(q.shape), k, v], dims)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        full = torch.cat(list(shards))
        groups = full.reshape(dims.num_query_groups, -1, *full.shape[1:])
        d = dims.kv_channels
        q, k, v = groups.split([2 * dims.heads_per_group * d, d, d], dim=1)
        heads = q.reshape(-1, 2, dims.heads_per_group, d, *q.shape[2:]).transpose(1, 2)
        return [heads.reshape(-1, *q.shape[2:]), *(x.flatten(0, 1).contiguous() for x in (k, v))]


_QKV = "self_attention.linear_qkv.weight"
GATED_ATTENTION: tuple[Rule, ...] = (
    *(rule for rule in DENSE if not rule.megatron[0].endswith(_QKV)),
    layer_rule(_QKV, qkv_names("weight"), GatedQueryKeyValue()),
    *QK_NORM,
)


def one_predicting_layer(rules: Sequence[Rule]) -> MTPLayers:
    """Return the one MTP layer for decoder layers with ``rules``; it has full attention."""
    names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
    own = [rule for rule in rules if ".linear_attn." not in rule.megatron[0]]
    return MTPLayers(mtp_rules(own, names, "mtp.layers.{layer}."), r"^mtp\.")


def delta_net(*projections: str) -> tuple[Rule, ...]:
    """Return the rules of a gated delta net, the module of transformers, with these input projections."""
    names = ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")
    return tuple(
        layer_rule(f"self_attention.linear_attn.{name}", (f"linear_attn.{name}",), Replicated())
        for name in (*names, *(f"{projection}.weight" for projection in projections))
    )
