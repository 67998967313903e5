"""Yield the model's weights as full Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.state.parallel import Ranks, expert_parallel, unwrap
from slime.backends.megatron_utils.weights.layouts import Dims
from slime.backends.megatron_utils.weights.maps import Family
from slime.backends.megatron_utils.weights.naming import Weight, model_dims, model_family, weights_of
from slime.utils import accelerator

Described = tuple[str, tuple[int, ...], torch.dtype]
Select = Callable[[Sequence[torch.nn.Module], Args, Family], list[Weight]]
"""A choice of a rank's weights: ``weights_of``, or those of adapters (``lora.peft``)."""


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module], args: Args, *, gather_pp: bool = False, select: Select = weights_of
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(hf_name, full tensor)`` on the device, in the order of the modules, routed experts after all else.

    Collective over the tensor- and expert-parallel groups: all their ranks must drain the iterator, and all get the
    weights of their pipeline stage, each once. With ``gather_pp`` it is collective over the pipeline group too and
    every rank gets the weights of all stages, first stage first. A tied output layer is not yielded. Padding of the
    vocabulary is cut off, and adapters (``--lora-rank``) are merged. Tensors may share memory with the model's
    parameters: copy what has to survive the next optimizer step.
    """
    import_megatron()
    from megatron.core import parallel_state as mpu

    if not gather_pp or mpu.get_pipeline_model_parallel_world_size() == 1:
        yield from _own_stage(model_chunks, args, select)
        return
    group = mpu.get_pipeline_model_parallel_group()
    described: list[list[Described]] = [[] for _ in range(group.size())]
    dist.all_gather_object(described, describe_hf_weights(model_chunks, args, select), group=group)
    for stage, descriptions in enumerate(described):
        source = dist.get_global_rank(group, stage)
        own = _own_stage(model_chunks, args, select) if stage == group.rank() else None
        for name, shape, dtype in descriptions:
            if own is not None:
                tensor = next(own)[1]
            else:
                tensor = torch.empty(shape, dtype=dtype, device=accelerator.current_device())
            dist.broadcast(tensor, src=source, group=group)
            yield name, tensor


def describe_hf_weights(
    model_chunks: Sequence[torch.nn.Module], args: Args, select: Select = weights_of
) -> list[Described]:
    """Return ``(name, full shape, dtype)`` of what ``iter_hf_weights`` yields for this stage; not collective."""
    import_megatron()
    dims = model_dims(args, unwrap(model_chunks[0]).config)
    described = []
    for unit in _units(model_chunks, args, select):
        shapes, dtype = unit[0].hf_shapes(dims), unit[0].parameter.dtype
        names = _hf_names(unit, dims)
        described += [(name, tuple(shapes[i % len(shapes)]), dtype) for i, name in enumerate(names)]
    return described


def _own_stage(
    model_chunks: Sequence[torch.nn.Module], args: Args, select: Select
) -> Iterator[tuple[str, torch.Tensor]]:
    dims = model_dims(args, unwrap(model_chunks[0]).config)
    for unit in _units(model_chunks, args, select):
        copies = [copy for weight in unit for copy in _full(weight, dims)]
        if unit[0].rule.is_stacked:
            # From "this rank's first expert on every rank, its second on every rank, ..." to the order of the experts.
            ranks = expert_parallel().size
            in_order = [copies[own * ranks + rank] for rank in range(ranks) for own in range(len(unit))]
            tensors = [torch.stack(parts) for parts in zip(*in_order, strict=True)]
        else:
            tensors = [tensor for copy in copies for tensor in copy]
        yield from zip(_hf_names(unit, dims), tensors, strict=True)


def _units(model_chunks: Sequence[torch.nn.Module], args: Args, select: Select) -> list[list[Weight]]:
    """Return what is gathered together: one weight, or those of all experts that share a Hugging Face tensor.

    This stage's weights without the copy of the embedding that a tied last stage holds.
    """
    family = model_family(args)
    weights = select(model_chunks, args, family)
    units: dict[object, list[Weight]] = {}
    for weight in sorted(weights, key=lambda weight: weight.rule.is_expert):
        if not (weight.name == "output_layer.weight" and family.embedding in weight.hf_names):
            key = (weight.rule.hf, weight.layer) if weight.rule.is_stacked else weight.name
            units.setdefault(key, []).append(weight)
    return list(units.values())


def _hf_names(unit: list[Weight], dims: Dims) -> list[str]:
    """Return the names of a unit's tensors, of all expert-parallel ranks, in the order in which they are yielded."""
    first = unit[0]
    if not first.rule.is_expert or first.rule.is_stacked or first.expert is None:
        return list(first.hf_names)
    ranks = expert_parallel()
    count = dims.num_experts // ranks.size
    own = first.expert - ranks.rank * count
    return [name for rank in range(ranks.size) for name in first.rule.hf_names(first.layer, own + rank * count)]


def _full(weight: Weight, dims: Dims) -> list[list[torch.Tensor]]:
    """Return the Hugging Face tensors of this weight, for a routed expert those of every expert-parallel rank."""
    blocks = [weight.value()]
    if weight.rule.is_expert:
        blocks = _all_gathered(blocks[0], expert_parallel())
    layout, ranks = weight.rule.layout, weight.tensor_ranks if weight.rule.layout.sharded else Ranks()
    return [layout.unshard(_all_gathered(block, ranks), dims) for block in blocks]


def _all_gathered(tensor: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    if ranks.size == 1:
        return [tensor]
    local = tensor.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks.size)]
    dist.all_gather(parts, local, group=ranks.group)
    return parts
