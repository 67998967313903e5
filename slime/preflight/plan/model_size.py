"""Parameters of a model, in total and on every rank of the trainer: which layers a pipeline rank holds, how large their
weights are, and which ranks share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.arguments.args import Args
from slime.models.shape import LayerKind, ModelShape, shape_of
from slime.models.stages import layout_stages, stage_letters
from slime.preflight.plan.placement import TrainerRanks, unchecked_ranks_of


@dataclass(frozen=True)
class Parallel(TrainerRanks):
    """The trainer's ranks and how they share a model. ``vpp`` counts the chunks of a pipeline rank."""

    vpp: int = 1
    sequence: bool = False

    @property
    def dense_ranks(self) -> int:
        """Ranks that share the optimizer state of everything but experts: data x context parallel."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the optimizer state of the same experts."""
        # Without expert parallelism Megatron reduces expert gradients like all others.
        return self.dense_ranks if self.ep == 1 else max(1, self.edp)

    @property
    def sp(self) -> int:
        """Ranks that share the sequence between the tensor-parallel regions."""
        return self.tp if self.sequence else 1


@dataclass(frozen=True)
class Chunk:
    """A run of decoder layers on one pipeline rank; ``mtp`` counts layers of multi-token prediction."""

    layers: range
    embedding: bool = False
    output: bool = False
    mtp: int = 0


def parallel_of(args: Args) -> Parallel:
    """Return the parallel sizes that ``args`` ask for."""
    ranks, layout = unchecked_ranks_of(args), args.pipeline_model_parallel_layout
    return Parallel(
        **vars(ranks),
        vpp=len(layout_stages(layout)) // ranks.pp if layout else args.virtual_pipeline_model_parallel_size or 1,
        sequence=bool(args.sequence_parallel) and ranks.tp > 1,
    )


def pipeline_chunks(args: Args, layers: int, mtp: int, parallel: Parallel) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank: ``[pp][vpp]``.

    As Megatron: layers run through the ranks chunk after chunk; the first and the last rank may have a number of
    layers of their own, embedding and loss may count as a layer each, and a layout string (``Et*3|(tt|)*29,m|L``)
    says it all. Raises ValueError when the layers do not come out even.
    """
    items = stage_letters(args, layers, mtp, parallel.pp, parallel.vpp)
    if sum(item.count("t") for item in items) != layers or len(items) != parallel.pp * parallel.vpp:
        raise ValueError(
            f"{layers} layers cannot be spread over {parallel.pp} pipeline stages x {parallel.vpp} chunks like this"
        )
    chunks, start = [], 0
    for item in items:  # virtual stage 0 of all ranks, virtual stage 1 of all ranks, ...
        stop = start + item.count("t")
        chunks.append(Chunk(range(start, stop), "E" in item, "L" in item, item.count("m")))
        start = stop
    return tuple(tuple(chunks[rank :: parallel.pp]) for rank in range(parallel.pp))


Part = Literal["embedding", "attention", "dense MLP", "experts", "norms", "output", "vision tower"]
PARTS: tuple[Part, ...] = ("embedding", "attention", "dense MLP", "experts", "norms", "output", "vision tower")


@dataclass(frozen=True)
class Weight:
    """``count`` tensors of ``numel`` elements.

    ``split``: the way that one is sharded: not at all (every rank has it), the tensor-parallel ranks, or the expert
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
        weights += _indexer(shape) if kind.indexer else []
    else:
        weights += _attention(shape, kind)
    return weights + (_experts(shape) if kind.moe else _mlp(shape, "dense MLP", shape.ffn))


def chunk_weights(shape: ModelShape, chunk: Chunk, *, vocab: int) -> Weights:
    """Return the weights of a pipeline chunk. Tied embeddings count once where both ends meet, else at both."""
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


def _attention(shape: ModelShape, kind: LayerKind) -> list[Weight]:
    groups, dim, projections = shape.heads_of(kind)
    query, key = shape.heads * dim, groups * dim
    out = query * (2 if shape.output_gate else 1) + projections * key
    weights = [Weight("attention", shape.hidden * out), Weight("attention", query * shape.hidden)]
    if shape.linear_bias or shape.qkv_bias:
        weights.append(Weight("attention", out))
    if shape.linear_bias:
        weights.append(Weight("attention", shape.hidden, "none"))
    if shape.sinks:
        weights.append(Weight("attention", shape.heads))
    if shape.qk_norm and shape.qk_norm_whole:
        weights += [*_norm(shape, query), *_norm(shape, key)]
    elif shape.qk_norm:
        weights += _norm(shape, dim, 2)
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
    return weights


def _indexer(shape: ModelShape) -> list[Weight]:
    """It reads the compressed query, and is whole on every rank."""
    latent, indexer = shape.latent, shape.indexer
    assert latent is not None
    assert indexer is not None
    query = latent.q_rank if latent.q_rank is not None else shape.hidden
    return [
        Weight("attention", query * indexer.heads * indexer.dim, "none"),
        Weight("attention", shape.hidden * indexer.dim, "none"),
        Weight("attention", shape.hidden * indexer.heads, "none"),
        Weight("norms", indexer.dim, "none", 2),
    ]


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
    if experts.beside:  # the scales of the router's input, and of its weights
        weights += [*_norm(shape, shape.hidden, 3), Weight("experts", shape.hidden + experts.number, "none")]
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


ALIGNED_START = 64  # Megatron's gradient buffer: every tensor starts at a multiple of this many elements
ALIGNED_BUCKET = 128  # and every bucket ends at a multiple of this many and of the ranks that share it


@dataclass(frozen=True)
class RankSize:
    """Parameters of one rank of pipeline stage ``stage`` (counted from 0).

    ``dense`` and ``expert`` are those whose gradients are reduced over the data x context-parallel ranks and over the
    expert-data-parallel ranks; the buffers count the elements of Megatron's flat buffers, which are padded.
    ``largest`` is the largest single tensor. ``tower``: those of a frozen vision tower, which come on top.
    """

    stage: int
    chunks: tuple[Chunk, ...]
    parts: Mapping[Part, int]
    dense: int
    expert: int
    dense_buffer: int
    expert_buffer: int
    largest: int
    tower: int = 0

    @property
    def total(self) -> int:
        """All parameters of the rank, without a frozen vision tower."""
        return self.dense + self.expert


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model. ``total`` and ``parts`` are those of the published checkpoint: vocabulary not padded,
    tied embeddings once, layers of multi-token prediction included. ``active`` are those that one token meets.
    """

    shape: ModelShape
    parallel: Parallel
    parts: Mapping[Part, int]
    total: int
    active: int
    ranks: tuple[RankSize, ...]


def model_size(args: Args, hf_config: Mapping[str, Any] | None = None) -> ModelSize:
    """Count the parameters of the model that ``args`` describe; for ``hf_config`` see ``shape_of``.

    Raises ValueError when the model is not described or its layers do not fit the pipeline.
    """
    shape, parallel = shape_of(args, hf_config), parallel_of(args)
    chunks = pipeline_chunks(args, shape.layers, shape.mtp, parallel)
    whole = Chunk(range(shape.layers), embedding=True, output=True, mtp=shape.mtp)
    tower = _tower(shape)
    weights = chunk_weights(shape, whole, vocab=shape.vocab_unpadded) + tower
    trained, frozen = (tower, 0) if args.train_vision_tower else ([], shape.tower.parameters if shape.tower else 0)
    parts = _parts(weights, Parallel())
    ranks = tuple(
        _rank_size(
            stage,
            held,
            [chunk_weights(shape, chunk, vocab=shape.vocab) + trained * chunk.embedding for chunk in held],
            parallel,
            frozen * any(chunk.embedding for chunk in held),
        )
        for stage, held in enumerate(chunks)
    )
    return ModelSize(shape, parallel, parts, sum(parts.values()), _active(shape, weights), ranks)


def _tower(shape: ModelShape) -> Weights:
    """The vision tower is whole on every rank of the stage that embeds tokens."""
    tensors = shape.tower.tensors() if shape.tower else []
    return [(Weight("vision tower", numel, "none", count), 1) for numel, count in tensors]


def _parts(weights: Weights, parallel: Parallel) -> dict[Part, int]:
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for weight, numel, count in elements(weights, parallel):
        parts[weight.part] += numel * count
    return parts


def _active(shape: ModelShape, weights: Weights) -> int:
    number, top_k = (shape.experts.number, shape.experts.top_k) if shape.experts else (1, 1)
    return sum(
        weight.numel * layers * (top_k * weight.count // number if weight.split == "expert" else weight.count)
        for weight, layers in weights
        if weight.part != "vision tower" and (weight.part != "embedding" or not shape.untied)
    )


def _rank_size(stage: int, chunks: tuple[Chunk, ...], held: list[Weights], parallel: Parallel, tower: int) -> RankSize:
    sizes = {"dense": 0, "expert": 0, "dense_buffer": 0, "expert_buffer": 0}
    largest = 0
    for weights in held:
        buckets = {"dense": 0, "expert": 0, "tied": 0}  # tied embeddings have a separate bucket
        for weight, numel, count in elements(weights, parallel):
            kind = "expert" if weight.split == "expert" and parallel.ep > 1 else "dense"
            sizes[kind] += numel * count
            buckets["tied" if weight.tied else kind] += _multiple(numel, ALIGNED_START) * count
            largest = max(largest, numel)
        shared_by = {"dense": parallel.dense_ranks, "expert": parallel.expert_ranks, "tied": parallel.dense_ranks}
        padded = {name: _multiple(size, math.lcm(ALIGNED_BUCKET, shared_by[name])) for name, size in buckets.items()}
        sizes["dense_buffer"] += padded["dense"] + padded["tied"]
        sizes["expert_buffer"] += padded["expert"]
    parts = _parts([entry for weights in held for entry in weights], parallel)
    return RankSize(stage=stage, chunks=chunks, parts=parts, largest=largest, tower=tower, **sizes)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
