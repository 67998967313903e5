"""Yield the model's weights as full Hugging Face tensors."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.weights.layouts import Dims
from slime.backends.megatron_utils.weights.maps.dense import EMBEDDING
from slime.backends.megatron_utils.weights.naming import Weight, model_dims, model_family, unwrap, weights_of
from slime.utils import accelerator

Described = tuple[str, tuple[int, ...], torch.dtype]


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module], args: Namespace, *, gather_pp: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(hf_name, full tensor)`` on the device, in the order of the modules.

    Collective over the tensor-parallel group: all its ranks must drain the iterator, and all get the weights of their
    pipeline stage. With ``gather_pp`` it is collective over the pipeline group too and every rank gets the weights of
    all stages, first stage first. A tied output layer is not yielded. Padding of the vocabulary is cut off. Tensors may
    share memory with the model's parameters: copy what has to survive the next optimiser step.
    """
    import_megatron()
    from megatron.core import parallel_state as mpu

    if not gather_pp or mpu.get_pipeline_model_parallel_world_size() == 1:
        yield from _own_stage(model_chunks, args)
        return
    group = mpu.get_pipeline_model_parallel_group()
    described: list[list[Described]] = [[] for _ in range(group.size())]
    dist.all_gather_object(described, describe_hf_weights(model_chunks, args), group=group)
    for stage, descriptions in enumerate(described):
        source = dist.get_global_rank(group, stage)
        own = _own_stage(model_chunks, args) if stage == group.rank() else None
        for name, shape, dtype in descriptions:
            if own is not None:
                tensor = next(own)[1]
            else:
                tensor = torch.empty(shape, dtype=dtype, device=accelerator.current_device())
            dist.broadcast(tensor, src=source, group=group)
            yield name, tensor


def describe_hf_weights(model_chunks: Sequence[torch.nn.Module], args: Namespace) -> list[Described]:
    """Return ``(name, full shape, dtype)`` of what ``iter_hf_weights`` yields for this stage; not collective."""
    import_megatron()
    from megatron.core import parallel_state as mpu

    dims = model_dims(args, unwrap(model_chunks[0]).config)
    tp_size = mpu.get_tensor_model_parallel_world_size()
    described = []
    for weight in _exported(model_chunks, args):
        shapes = weight.rule.layout.hf_shapes(tuple(weight.parameter.shape), tp_size, dims)
        described += [(n, tuple(s), weight.parameter.dtype) for n, s in zip(weight.hf_names, shapes, strict=True)]
    return described


def _own_stage(model_chunks: Sequence[torch.nn.Module], args: Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    dims = model_dims(args, unwrap(model_chunks[0]).config)
    for weight in _exported(model_chunks, args):
        yield from zip(weight.hf_names, _full(weight, dims), strict=True)


def _exported(model_chunks: Sequence[torch.nn.Module], args: Namespace) -> list[Weight]:
    """Return this stage's weights without the copy of the embedding that a tied last stage holds."""
    weights = weights_of(model_chunks, args, model_family(args))
    return [w for w in weights if not (w.name == "output_layer.weight" and EMBEDDING in w.hf_names)]


def _full(weight: Weight, dims: Dims) -> list[torch.Tensor]:
    from megatron.core import parallel_state as mpu

    shards = [weight.parameter.detach()]
    group = mpu.get_tensor_model_parallel_group()
    if weight.rule.layout.sharded and group.size() > 1:
        local = shards[0].contiguous()
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local, group=group)
    return weight.rule.layout.unshard(shards, dims)
