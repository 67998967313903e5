"""Rules of MTP layers: two norms and a projection, a decoder layer, and a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.weights.layouts import Dims, Layout, Replicated, Rows
from slime.backends.megatron_utils.weights.maps.dense import EMBEDDING, HF_LAYER, LM_HEAD, MEGATRON_LAYER
from slime.backends.megatron_utils.weights.maps.rule import MTPLayers, Rule

MEGATRON_MTP = "mtp.layers.{layer}."
PROJECTION = "eh_proj.weight"
DEEPSEEK = ("enorm.weight", "hnorm.weight", PROJECTION, "shared_head.norm.weight")
"""DeepSeek-V3's names, behind those of a layer that is numbered on after the last one."""
COPIES = ((f"{HF_LAYER}embed_tokens.weight", EMBEDDING), (f"{HF_LAYER}shared_head.head.weight", LM_HEAD))
"""The copies of embedding and output layer that DeepSeek-V3's checkpoints have in every such layer."""


def in_extra_layers(rules: Sequence[Rule]) -> MTPLayers:
    """Return the MTP layers of DeepSeek-V3's relatives, whose decoder layers have ``rules``."""
    return MTPLayers(mtp_rules(rules), copies=COPIES)


class HiddenFirst(Rows):
    """The projection of [hidden states, embeddings]; Megatron's is of [embeddings, hidden states]."""

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return _exchanged(super().shard(sources, tp_rank, tp_size, dims))

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [_exchanged(full) for full in super().unshard(shards, dims)]


def _exchanged(projection: torch.Tensor) -> torch.Tensor:
    first, second = projection.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def mtp_rules(
    rules: Sequence[Rule],
    names: tuple[str, str, str, str] = DEEPSEEK,
    layer: str = HF_LAYER,
    projection: Layout | None = None,
) -> tuple[Rule, ...]:
    """Return the rules of layers whose decoder layer has the weights of ``rules``, its tensors behind ``layer``.

    ``names``: of the embeddings' norm, the hidden states' norm, the projection, and the norm at the end. They go
    behind ``layer``, but for whole names (``mtp.``) of a family that has one such layer.
    """
    kinds = ("enorm.weight", "hnorm.weight", PROJECTION, "final_layernorm.weight")
    layouts = (Replicated(), Replicated(), projection or Rows(), Replicated())
    own = tuple(
        Rule((MEGATRON_MTP + kind,), (name if name.startswith("mtp.") else layer + name,), layout)
        for kind, name, layout in zip(kinds, names, layouts, strict=True)
    )
    return own + tuple(_of_decoder_layer(rule, layer) for rule in rules if rule.megatron[0].startswith(MEGATRON_LAYER))


def _of_decoder_layer(rule: Rule, layer: str) -> Rule:
    prefix = f"{MEGATRON_MTP}transformer_layer."
    megatron = tuple(name.replace(MEGATRON_LAYER, prefix, 1) for name in rule.megatron)
    return Rule(megatron, tuple(layer + name.partition("layers.{layer}.")[2] for name in rule.hf), rule.layout)
