"""The experts of Gemma 4 26B-A4B, beside the MLP of every layer. Import after ``import_megatron()``.

The MLP is Megatron's shared expert. Its input, the experts' and the router's are normalized each in its own way, and so
are the outputs of MLP and experts before they are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


class ScalingRouter(TopKRouter):
    """Megatron's router of normalized hidden states times ``scale``; experts' weights are times ``per_expert_scale``.

    ``softmax`` over all experts, with the chosen ones' divided by their sum, is that over the chosen ones.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", config.num_moe_experts)):
            parameter = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=self.weight.device))
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (unknown to torch)
            self.register_parameter(name, parameter)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights ``[tokens, experts]``, 0 where a token does not pass the expert, and where it does."""
        width = input.size(-1)
        normed = F.rms_norm(input.float(), (width,), eps=self.config.layernorm_epsilon).to(input.dtype)
        probs, chosen = super().forward(normed * self.scale * width**-0.5, padding_mask)
        return probs * self.per_expert_scale.to(probs.dtype), chosen


class ExpertsBesideMLP(MoELayer):
    """Of hidden states that are not normalized: the sum of MLP (the shared expert) and experts, between their norms."""

    def __init__(
        self, config: TransformerConfig, *args: Any, norm: Callable[..., torch.nn.Module], **kwargs: Any
    ) -> None:
        if config.moe_shared_expert_overlap:
            raise ValueError("--moe-shared-expert-overlap: Gemma 4 normalizes what it overlaps with; leave it out")
        super().__init__(config, *args, **kwargs)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            for number in ("_2",) if name.startswith("pre") else ("_1", "_2"):
                self.add_module(name + number, norm(config, config.hidden_size, eps=config.layernorm_epsilon))
        self.pre_feedforward_layernorm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Return the normalized output of the MLP."""
        output = super().shared_experts_compute(self.pre_feedforward_layernorm(hidden_states))
        return self.post_feedforward_layernorm_1(output)

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the dispatcher exchanges."""
        return super().preprocess(self.pre_feedforward_layernorm_2(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        """Return the sum of both outputs."""
        return self.post_feedforward_layernorm_2(super().postprocess(output, None)) + shared_expert_output


def put_experts_beside(layer: ModuleSpec, norm: Callable[..., torch.nn.Module]) -> None:
    """Exchange the experts of a layer's spec for these, in place; the layer itself normalizes no input of its MLP."""
    parts = layer.submodules = copy.copy(layer.submodules)
    parts.pre_mlp_layernorm, parts.mlp = IdentityOp, copy.copy(parts.mlp)
    parts.mlp.module, parts.mlp.params = ExpertsBesideMLP, {**parts.mlp.params, "norm": norm}
    parts.mlp.submodules = copy.copy(parts.mlp.submodules)
    parts.mlp.submodules.router = ScalingRouter
