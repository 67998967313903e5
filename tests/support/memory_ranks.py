"""Ranks of ``tests/integration/test_memory_estimate.py``, which measure memory."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import switch_layout
from tests.support.trainer import trainer_args


def case_args(checkpoint: str | Path, ranks: int, **values: Any) -> Namespace:
    """Return the namespace of a tiny trainer on ``ranks`` processes of a machine without GPUs."""
    args = trainer_args(checkpoint)
    args.bias_swiglu_fusion, args.apply_rope_fusion = True, False
    args.actor_num_nodes, args.actor_num_gpus_per_node, args.seq_length = 1, ranks, 128
    for name, value in values.items():
        setattr(args, name, value)
    return args


def allow_latent_attention() -> None:
    """Let megatron's latent attention do without TransformerEngine, whose classes it otherwise compares with."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = False


def static_bytes(checkpoint: str, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Build model and optimizer of every case; return this rank's stage, parameters and bytes."""
    from slime.backends.megatron_utils.model.provider import get_model
    from slime.backends.megatron_utils.state.optimizer import build_optimizer

    allow_latent_attention()
    from megatron.core import parallel_state as mpu

    found = []
    for case in cases:
        args = case_args(checkpoint, ranks, **case)
        switch_layout(args)
        model = get_model(args)
        optimizer = build_optimizer(args, model)
        buffers = [buffer for chunk in model for buffer in _buffers(chunk)]
        found.append(
            {
                "stage": mpu.get_pipeline_model_parallel_rank(),
                "count": sum(p.numel() for chunk in model for p in chunk.parameters()),
                "parameters": sum(buffer.param_data.nbytes for buffer in buffers),
                "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
                "optimizer": _optimizer_bytes(model, optimizer),
            }
        )
    return found


def _buffers(chunk: torch.nn.Module) -> list[Any]:
    return [*chunk.__dict__["buffers"], *chunk.__dict__["expert_parallel_buffers"]]


def _optimizer_bytes(model: list[torch.nn.Module], optimizer: Any) -> int:
    """Moments, and master weights where they are not the model's own."""
    from slime.backends.megatron_utils.state.offload import torch_optimizers

    own = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
    own |= {buffer.param_data.untyped_storage().data_ptr() for chunk in model for buffer in _buffers(chunk)}
    total = 0
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            total += sum(p.nbytes for p in group["params"] if p.untyped_storage().data_ptr() not in own)
        for state in inner.state.values():
            total += sum(value.nbytes for value in state.values() if torch.is_tensor(value) and value.dim() > 0)
    return total


def kept_bytes(checkpoint: str, ranks: int, cases: list[dict[str, Any]], *, tokens: int, sequence: int) -> list[float]:
    """Return for every case what one layer keeps for backward, in bytes per token: the second layer's share."""
    allow_latent_attention()
    found = []
    for case in cases:
        args = case_args(checkpoint, ranks, **case)
        switch_layout(args)
        one, two = (_saved(_with_layers(args, layers), tokens, sequence) for layers in (1, 2))
        found.append((two - one) / tokens)
    return found


def _with_layers(args: Namespace, layers: int) -> Namespace:
    return Namespace(**{**vars(args), "num_layers": layers})


def _saved(args: Namespace, tokens: int, sequence: int) -> int:
    """Run a packed micro-batch forward; return the bytes of the storages that autograd keeps, without weights."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from slime.backends.megatron_utils.model.provider import get_model

    (model,) = get_model(args, wrap_with_ddp=False)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel():
            storages[storage.data_ptr()] = storage
        return tensor

    bounds = torch.arange(0, tokens + 1, sequence, dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=sequence, max_seqlen_kv=sequence
    )
    ids = torch.randint(0, args.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=packing)
    return sum(storage.nbytes() for storage in storages.values())
