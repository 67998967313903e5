"""Latent attention whose gradients are right under tensor parallelism. Import after ``import_megatron()``."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch.nn import functional as F

from slime.utils import accelerator


class DuplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole, as TransformerEngine's is here."""

    def __init__(self, config: Any, input_size: int, output_size: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        # Its gradient is that of the rank's part of the sequence, to be summed over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork("data-parallel-rng"):  # the same numbers on all tensor-parallel ranks
                config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``x @ weight.T``, and no bias."""
        return F.linear(x, self.weight), None


class SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group.

    Megatron's ``copy_to_tensor_model_parallel_region`` leaves a gradient that is not contiguous as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Return ``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the sum over the group."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's latent attention, without three faults of it under tensor parallelism.

    The rotated part of a key is one for all heads, so its gradient is the sum over all ranks' heads: without sequence
    parallelism, and with column-parallel down-projections always, megatron leaves the sum out. Column-parallel
    down-projections are what it takes without TransformerEngine; here they are duplicated. And the gradient of
    ``q_layernorm``, which each rank has whole, is taken for one to be summed over the ranks.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, duplicate: bool, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if duplicate:
            rotated = config.qk_pos_emb_head_dim
            self.linear_kv_down_proj = DuplicatedLinear(config, config.hidden_size, config.kv_lora_rank + rotated)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = DuplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        if config.sequence_parallel or self.tp_group.size() == 1:  # the gather of the sequence sums that gradient
            return
        self.linear_kv_down_proj.register_forward_hook(self._sum_rotated_gradient)
        for parameter in self.q_layernorm.parameters() if config.q_lora_rank is not None else ():
            parameter.average_gradients_across_tp_domain = True  # the mean of equal gradients changes nothing

    def _sum_rotated_gradient(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        combined, bias = outputs
        latent, rotated = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        rotated = SummedGradient.apply(rotated, self.tp_group)
        return torch.cat([latent, rotated], dim=-1), bias


def fix_mla_tp_gradients(block: Any, *, duplicate: bool) -> Any:
    """Exchange megatron's latent attention for :class:`LatentSelfAttention` in the spec of a block, in place.

    ``duplicate``: whether the down-projections are to be duplicated (TransformerEngine's are).
    """
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentSelfAttention
            attention.params = {**attention.params, "duplicate": duplicate}
    return block
