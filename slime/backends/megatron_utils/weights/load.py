"""Load Hugging Face weights into the model chunks of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.state.parallel import pipeline_parallel, unwrap
from slime.backends.megatron_utils.weights.layouts import Dims
from slime.backends.megatron_utils.weights.maps import Family
from slime.backends.megatron_utils.weights.maps.parts import LM_HEAD
from slime.backends.megatron_utils.weights.maps.rule import as_template
from slime.backends.megatron_utils.weights.naming import (
    MTP,
    Weight,
    is_value_head,
    model_dims,
    model_family,
    tied,
    weights_of,
)
from slime.backends.megatron_utils.weights.untrained import carried_names, mtp_names
from slime.weights.hf.checkpoint import HfCheckpoint

if TYPE_CHECKING:
    from slime.backends.megatron_utils.weights.layouts import Index, Slice

MAX_LISTED = 8
COMPARED_ROWS = 64

Own = dict[tuple[bool, int | None], set[int | None]]
"""The experts (None: not one) that a rank has, by (True for an MTP layer, layer)."""


@torch.no_grad()
def load_hf(model_chunks: Sequence[torch.nn.Module], hf_dir: str | Path, args: Args) -> None:
    """Copy the weights in ``hf_dir`` into the parameters; each rank reads only its own part of the files.

    Not collective. Raises ValueError for missing, unexpected and mis-shaped tensors (all of a kind at once, with tensor
    and file), and for a family without a weight map.
    """
    import_megatron()
    family = model_family(args, hf_dir)
    dims = model_dims(args, unwrap(model_chunks[0]).config)
    weights = weights_of(model_chunks, args, family)
    with HfCheckpoint(hf_dir) as checkpoint:
        unneeded, in_mtp = set(carried_names(checkpoint, family)), mtp_names(checkpoint, family)
        if any(weight.name.startswith(MTP) for weight in weights):
            check_copies(checkpoint, family, in_mtp)
            unneeded -= {name for name in in_mtp if family.copy_of(name) is None}
        if any(is_value_head(p) for chunk in model_chunks for p in chunk.parameters()):
            unneeded.add(LM_HEAD)
        _check_names(checkpoint, weights, family, args, dims, unneeded, in_mtp)
        _check_shapes(checkpoint, weights, dims)
        for weight in weights:
            ranks = weight.tensor_ranks
            shard = weight.rule.layout.shard(_sources(checkpoint, weight), ranks.rank, ranks.size, dims)
            weight.parameter.copy_(shard)


def _sources(checkpoint: HfCheckpoint, weight: Weight) -> list[Any]:
    sources = [checkpoint.slice(name) for name in weight.hf_names]
    return [OneOf(source, weight.expert) for source in sources] if weight.rule.is_stacked else sources


class OneOf:
    """One entry of the first dimension of a lazy slice, itself a lazy slice."""

    def __init__(self, stack: Slice, number: int | None) -> None:
        self._stack, self._number = stack, number

    def get_shape(self) -> list[int]:
        return list(self._stack.get_shape())[1:]

    def __getitem__(self, key: Index) -> torch.Tensor:
        return self._stack[(self._number, *(key if isinstance(key, tuple) else (key,)))]


def _check_names(
    checkpoint: HfCheckpoint,
    weights: list[Weight],
    family: Family,
    args: Args,
    dims: Dims,
    unneeded: set[str],
    in_mtp: frozenset[str],
) -> None:
    wanted = {name for weight in weights for name in weight.hf_names}
    missing = sorted(wanted - checkpoint.names)
    if missing:
        raise ValueError(
            f"{checkpoint.path}: {len(missing)} tensors that the model needs are missing: {_some(missing)}. Do the "
            "model flags describe this checkpoint?"
        )
    own: Own = {}
    for weight in weights:
        own.setdefault((weight.name.startswith(MTP), weight.layer), set()).add(weight.expert)
    unexpected = [
        f"{name} (in {checkpoint.file_of(name).name})"
        for name in sorted(checkpoint.names - wanted - unneeded)
        if not family.ignores_hf(name) and not _held_elsewhere(name, name in in_mtp, family, own, args, dims)
    ]
    if unexpected:
        way_out = "Do the model flags (layers, biases, norms) describe this checkpoint?"
        if any("_scale_inv" in name for name in unexpected):
            way_out = "Its weights are in FP8: slime.utils.external_utils.command_utils.fp8_cast_bf16 makes them bf16"
        raise ValueError(
            f"{checkpoint.path}: {len(unexpected)} tensors have no place in the model: {_some(unexpected)}. {way_out}"
        )


def _held_elsewhere(name: str, is_mtp: bool, family: Family, own: Own, args: Args, dims: Dims) -> bool:
    """Return whether another rank holds the tensor (or, if tied, no rank needs to).

    ``is_mtp``: whether it is of an MTP layer; these are all on one stage.
    """
    if not family.knows_hf(name):
        return False
    layer, expert = as_template(name)[1:3]
    if layer is None:
        return name != LM_HEAD or tied(args) or pipeline_parallel().size > 1
    if (is_mtp, layer) not in own:
        return not is_mtp and layer < args.num_layers
    experts = own[is_mtp, layer]
    return experts != {None} and expert is not None and expert < dims.num_experts and expert not in experts


def check_copies(checkpoint: HfCheckpoint, family: Family, in_mtp: frozenset[str]) -> None:
    """Compare the first rows of tensors that repeat another one: the model has only that."""
    for name in sorted(in_mtp):
        original = family.copy_of(name)
        if original is None or original not in checkpoint.names:
            continue
        copy, rows = checkpoint.slice(name), slice(0, COMPARED_ROWS)
        if not torch.equal(copy[rows], checkpoint.slice(original)[rows]):
            raise ValueError(
                f"{checkpoint.path}: {name} is not the copy of {original} that it should be. The layers of "
                "--mtp-num-layers share the model's embedding and output layer: leave the flag out to keep them as "
                "they are"
            )


def _check_shapes(checkpoint: HfCheckpoint, weights: list[Weight], dims: Dims) -> None:
    wrong = []
    for weight in weights:
        for name, shape in zip(weight.hf_names, weight.hf_shapes(dims), strict=True):
            seen = tuple(checkpoint.slice(name).get_shape())
            if seen != tuple(shape):
                wrong.append(f"{name} (in {checkpoint.file_of(name).name}) is {list(seen)}, expected {list(shape)}")
    if wrong:
        raise ValueError(
            f"{checkpoint.path}: {len(wrong)} tensors do not have the shape the model flags ask for: {_some(wrong)}"
        )


def _some(items: list[str]) -> str:
    more = f", and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return "; ".join(items[:MAX_LISTED]) + more
