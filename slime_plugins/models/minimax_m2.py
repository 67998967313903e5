"""MiniMax-M2: ``--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm over all ``heads`` together: ``x / sqrt(mean over heads and channels of x^2 + eps) * weight``.

    Tensor-parallel ranks have some of the heads each; they share the mean. The weight, ``[heads * channels]``, is whole
    on every rank, which uses (and has a gradient for) the part of its heads: Megatron sums the gradients of norms on
    queries and keys over these ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, **_: object) -> None:
        super().__init__()
        from megatron.core import parallel_state as mpu

        from slime.utils import accelerator

        self.group = mpu.get_tensor_model_parallel_group()
        if heads % self.group.size():
            raise ValueError(
                f"a norm over all {heads} heads cannot be split over --tensor-model-parallel-size {self.group.size()}; "
                "choose a divisor of both the heads and the query groups"
            )
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (``[..., local heads, channels]``) normalized, in its own dtype."""
        from torch.distributed.nn.functional import all_reduce

        squares = x.float().square().sum(dim=(-2, -1), keepdim=True)
        if self.group.size() > 1:
            squares = all_reduce(squares, group=self.group)  # its gradient is summed over the ranks as well
        weight = self.weight.view(-1, x.size(-1)).chunk(self.group.size())[self.group.rank()]
        normed = x.float() * torch.rsqrt(squares / self.weight.numel() + self.eps)
        return normed.to(x.dtype) * weight


def get_minimax_m2_layer_spec(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: norms on queries and keys span all heads."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec

    block = decoder_block_spec(args, config, vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(AllHeadsRMSNorm, params={"heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(AllHeadsRMSNorm, params={"heads": config.num_query_groups})
    return block
