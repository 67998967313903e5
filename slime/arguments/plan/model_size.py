"""How many parameters a model has, in total and on every rank of the trainer."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.arguments.plan.model_stages import Chunk, Parallel, parallel_of, pipeline_chunks
from slime.arguments.plan.model_weights import PARTS, Part, Weights, chunk_weights, elements
from slime.utils.model_shape import ModelShape, shape_of

ALIGNED_START = 64  # Megatron's gradient buffer: every tensor starts at a multiple of this many elements
ALIGNED_BUCKET = 128  # and every bucket ends at a multiple of this many and of the ranks that share it


@dataclass(frozen=True)
class RankSize:
    """Parameters of one rank of pipeline stage ``stage`` (counted from 0).

    ``dense`` and ``expert`` are those whose gradients are reduced over the data x context-parallel ranks and over the
    expert-data-parallel ranks; the buffers count the elements of Megatron's flat buffers, which are padded.
    ``largest`` is the largest single tensor.
    """

    stage: int
    chunks: tuple[Chunk, ...]
    parts: Mapping[Part, int]
    dense: int
    expert: int
    dense_buffer: int
    expert_buffer: int
    largest: int

    @property
    def total(self) -> int:
        """All parameters of the rank."""
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

    @property
    def largest_rank(self) -> RankSize:
        """The rank with the most parameters."""
        return max(self.ranks, key=lambda rank: rank.total)


def model_size(args: Namespace, hf_config: Mapping[str, Any] | None = None) -> ModelSize:
    """Count the parameters of the model that ``args`` describe; for ``hf_config`` see ``shape_of``.

    Raises ValueError when the model is not described or its layers do not fit the pipeline.
    """
    shape, parallel = shape_of(args, hf_config), parallel_of(args)
    chunks = pipeline_chunks(args, shape.layers, shape.mtp, parallel)
    whole = Chunk(range(shape.layers), embedding=True, output=True, mtp=shape.mtp)
    weights = chunk_weights(shape, whole, vocab=shape.vocab_unpadded)
    parts = _parts(weights, Parallel())
    ranks = tuple(
        _rank_size(
            stage,
            held,
            [chunk_weights(shape, chunk, vocab=shape.vocab) for chunk in held],
            parallel,
        )
        for stage, held in enumerate(chunks)
    )
    return ModelSize(shape, parallel, parts, sum(parts.values()), _active(shape, weights), ranks)


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
        if weight.part != "embedding" or not shape.untied
    )


def _rank_size(stage: int, chunks: tuple[Chunk, ...], held: list[Weights], parallel: Parallel) -> RankSize:
    sizes = {"dense": 0, "expert": 0, "dense_buffer": 0, "expert_buffer": 0}
    largest = 0
    for weights in held:
        buckets = {"dense": 0, "expert": 0, "tied": 0}  # tied embeddings have a bucket of their own
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
    return RankSize(stage=stage, chunks=chunks, parts=parts, largest=largest, **sizes)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
