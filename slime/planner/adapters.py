"""Parameters of adapters (``--lora-rank``) on every rank of the trainer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Literal, NamedTuple

from slime.planner.model_size import Parallel, RankSize
from slime.utils.model_shape import LayerKind, ModelShape


class _Projection(NamedTuple):
    """``cut``: how tensor parallelism cuts it. ``owners``: routed experts that have one of their own, else 1."""

    name: str
    inputs: int
    outputs: int
    cut: Literal["rows", "columns", "none"]
    owners: int = 1
    expert: bool = False


def adapter_parameters(args: Namespace, shape: ModelShape, rank: RankSize, parallel: Parallel) -> tuple[int, int]:
    """Return ``(dense, expert)``: the parameters of adapters on one rank, those of routed experts apart.

    Projections by the names that most families have; a family that stores gate and up projection
    as one has a few less.
    """
    found = {False: 0, True: 0}
    for chunk in rank.chunks:
        for layer in chunk.layers:
            for projection in _of_layer(shape, shape.kinds[layer]):
                if args.lora_target_modules == ["all-linear"] or projection.name in args.lora_target_modules:
                    found[projection.expert] += _on_rank(projection, args.lora_rank, parallel)
    return found[False], found[True]


def _on_rank(projection: _Projection, rank: int, parallel: Parallel) -> int:
    """A is ``[rank, inputs]`` and B ``[outputs, rank]``; one of them is cut, or none."""
    ranks = parallel.etp if projection.expert else parallel.tp
    inputs = projection.inputs // ranks if projection.cut == "columns" else projection.inputs
    outputs = projection.outputs // ranks if projection.cut == "rows" else projection.outputs
    count = projection.owners // parallel.ep if projection.expert else 1
    return rank * (inputs + outputs) * count


def _of_layer(shape: ModelShape, kind: LayerKind) -> Iterator[_Projection]:
    if kind.linear:
        pass  # its projections have no adapters
    elif shape.latent is not None:
        yield from _latent(shape)
    else:
        query, key = shape.heads * shape.head_dim, shape.groups * shape.head_dim
        yield _Projection("q_proj", shape.hidden, query * (2 if shape.output_gate else 1), "rows")
        yield _Projection("k_proj", shape.hidden, key, "rows")
        yield _Projection("v_proj", shape.hidden, key, "rows")
        yield _Projection("o_proj", query, shape.hidden, "columns")
    if not kind.moe:
        yield from _mlp(shape, shape.ffn)
        return
    experts = shape.experts
    assert experts is not None
    yield from (p._replace(owners=experts.number, expert=True) for p in _mlp(shape, experts.ffn))
    if experts.shared:
        yield from _mlp(shape, experts.shared)


def _latent(shape: ModelShape) -> Iterator[_Projection]:
    latent, hidden = shape.latent, shape.hidden
    assert latent is not None
    query = shape.heads * latent.query_dim
    if latent.q_rank is None:
        yield _Projection("q_proj", hidden, query, "rows")
    else:
        yield _Projection("q_a_proj", hidden, latent.q_rank, "none")
        yield _Projection("q_b_proj", latent.q_rank, query, "rows")
    yield _Projection("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope_dim, "none")
    yield _Projection("kv_b_proj", latent.kv_rank, shape.heads * (latent.qk_dim + latent.v_dim), "rows")
    yield _Projection("o_proj", shape.heads * latent.v_dim, hidden, "columns")


def _mlp(shape: ModelShape, ffn: int) -> Iterator[_Projection]:
    yield _Projection("gate_proj", shape.hidden, ffn, "rows")
    yield _Projection("up_proj", shape.hidden, ffn, "rows")
    yield _Projection("down_proj", ffn, shape.hidden, "columns")
