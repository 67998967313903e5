"""The weights of a model one by one: how large they are and which ranks share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from slime.arguments.plan.model_stages import Chunk, Parallel
from slime.utils.model_shape import LayerKind, ModelShape

Part = Literal["embedding", "attention", "dense MLP", "experts", "norms", "output"]
PARTS: tuple[Part, ...] = ("embedding", "attention", "dense MLP", "experts", "norms", "output")


@dataclass(frozen=True)
class Weight:
    """``count`` tensors of ``numel`` elements.

    ``split`` says who shares one: nobody (every rank has it), the tensor-parallel ranks, or the expert
    tensor-parallel ranks, with the tensors themselves spread over the expert-parallel ranks. ``tied`` are the copies
    of an embedding that several pipeline stages hold.
    """

    part: Part
    numel: int
    split: Literal["none", "tensor", "expert"] = "tensor"
    count: int = 1
    tied: bool = False

    def on_rank(self, parallel: Parallel) -> tuple[int, int]:
        """Return (elements of each tensor, tensors) that one rank holds."""
        if self.split == "expert":
            return self.numel // parallel.etp, self.count // parallel.ep
        return (self.numel // parallel.tp if self.split == "tensor" else self.numel), self.count


Weights = list[tuple[Weight, int]]
"""Weights, and how many layers have them."""


def layer_weights(shape: ModelShape, kind: LayerKind) -> list[Weight]:
    """Return the weights of one decoder layer."""
    norms = 2 + shape.post_attention_norm + shape.post_mlp_norm
    weights = [*_norm(shape, shape.hidden, norms)]
    if kind.linear:
        weights += _linear_attention(shape)
    elif shape.latent is not None:
        weights += _latent_attention(shape)
    else:
        weights += _attention(shape)
    return weights + (_experts(shape) if kind.moe else _mlp(shape, "dense MLP", shape.ffn))


def chunk_weights(shape: ModelShape, chunk: Chunk, *, vocab: int) -> Weights:
    """Return the weights of a pipeline chunk. Tied embeddings are there once where both ends meet, else at both."""
    found: Weights = []
    kinds: dict[LayerKind, int] = {}
    for layer in chunk.layers:
        kinds[shape.kinds[layer]] = kinds.get(shape.kinds[layer], 0) + 1
    for kind, layers in kinds.items():
        found += [(weight, layers) for weight in layer_weights(shape, kind)]
    several = not (chunk.embedding and chunk.output)
    if chunk.embedding:
        found.append((Weight("embedding", vocab * shape.hidden, tied=several and not shape.untied), 1))
        if shape.positions:
            found.append((Weight("embedding", shape.positions * shape.hidden, "none"), 1))
    if chunk.mtp:
        found += [(weight, chunk.mtp) for weight in _mtp(shape)]
    if chunk.output:
        found += [(weight, 1) for weight in _norm(shape, shape.hidden)]
        if shape.untied or not chunk.embedding:
            found.append((Weight("output", vocab * shape.hidden, tied=several and not shape.untied), 1))
    return found


def elements(weights: Iterable[tuple[Weight, int]], parallel: Parallel) -> Iterator[tuple[Weight, int, int]]:
    """Yield every weight with the elements of one of its tensors on a rank and the number of these tensors there."""
    for weight, layers in weights:
        numel, count = weight.on_rank(parallel)
        yield weight, numel, count * layers


def _norm(shape: ModelShape, size: int, count: int = 1) -> list[Weight]:
    return [Weight("norms", size, "none", count * shape.norm)]


def _attention(shape: ModelShape) -> list[Weight]:
    query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    out = query * (2 if shape.output_gate else 1) + 2 * key
    weights = [Weight("attention", shape.hidden * out), Weight("attention", query * shape.hidden)]
    if shape.linear_bias or shape.qkv_bias:
        weights.append(Weight("attention", out))
    if shape.linear_bias:
        weights.append(Weight("attention", shape.hidden, "none"))
    if shape.qk_norm and shape.qk_norm_whole:
        weights += [*_norm(shape, query), *_norm(shape, key)]
    elif shape.qk_norm:
        weights += _norm(shape, shape.head_dim, 2)
    return weights


def _latent_attention(shape: ModelShape) -> list[Weight]:
    """The down-projections are whole on every tensor-parallel rank."""
    latent, hidden, heads = shape.latent, shape.hidden, shape.heads
    assert latent is not None
    weights = [
        Weight("attention", hidden * (latent.kv_rank + latent.rope_dim), "none"),
        Weight("attention", latent.kv_rank * heads * (latent.qk_dim + latent.v_dim)),
        Weight("attention", heads * latent.v_dim * hidden),
    ]
    if latent.q_rank is None:
        weights.append(Weight("attention", hidden * heads * latent.query_dim))
    else:
        weights.append(Weight("attention", hidden * latent.q_rank, "none"))
        weights.append(Weight("attention", latent.q_rank * heads * latent.query_dim))
    if shape.linear_bias:
        weights.append(Weight("attention", hidden, "none"))
    if shape.qk_norm:
        weights += _norm(shape, latent.kv_rank)
        weights += _norm(shape, latent.q_rank) if latent.q_rank is not None else []
    if shape.indexer is not None:
        # The indexer reads the compressed query, and is whole on every rank.
        query = latent.q_rank if latent.q_rank is not None else hidden
        width = shape.indexer.heads * shape.indexer.dim
        weights += [
            Weight("attention", query * width, "none"),
            Weight("attention", hidden * shape.indexer.dim, "none"),
            Weight("attention", hidden * shape.indexer.heads, "none"),
            Weight("norms", shape.indexer.dim, "none", 2),
        ]
    return weights


def _linear_attention(shape: ModelShape) -> list[Weight]:
    linear = shape.linear
    assert linear is not None
    convolved = 2 * linear.keys + linear.values
    return [
        Weight("attention", shape.hidden * (convolved + linear.values + 2 * linear.value_heads)),
        Weight("attention", convolved * linear.kernel),
        Weight("attention", linear.value_heads, "tensor", 2),  # the time step's bias and the decay
        Weight("norms", linear.value_dim, "none"),
        Weight("attention", linear.values * shape.hidden),
    ]


def _mlp(shape: ModelShape, part: Part, ffn: int) -> list[Weight]:
    up = ffn * (2 if shape.gated else 1)
    weights = [Weight(part, shape.hidden * up), Weight(part, ffn * shape.hidden)]
    if shape.linear_bias:
        weights += [Weight(part, up), Weight(part, shape.hidden, "none")]
    return weights


def _experts(shape: ModelShape) -> list[Weight]:
    experts = shape.experts
    assert experts is not None
    width, up = experts.latent or shape.hidden, experts.ffn * (2 if shape.gated else 1)
    weights = [
        Weight("experts", experts.number * shape.hidden, "none"),  # the router
        Weight("experts", width * up, "expert", experts.number),
        Weight("experts", experts.ffn * width, "expert", experts.number),
    ]
    if shape.linear_bias:
        weights += [
            Weight("experts", experts.number, "none"),
            Weight("experts", up, "expert", experts.number),
            Weight("experts", width, "expert", experts.number),
        ]
    if experts.latent:
        weights.append(Weight("experts", shape.hidden * experts.latent, "none", 2))
    if experts.shared:
        weights += _mlp(shape, "experts", experts.shared)
        weights += [Weight("experts", shape.hidden, "none")] if experts.shared_gate else []
    return weights


def _mtp(shape: ModelShape) -> list[Weight]:
    """The layer that predicts one token further (DeepSeek-V3): two norms, a projection, a layer, a norm."""
    return [
        *_norm(shape, shape.hidden, 3),
        Weight("attention", 2 * shape.hidden * shape.hidden),
        *layer_weights(shape, shape.kinds[-1]),
    ]
