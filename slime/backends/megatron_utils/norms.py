"""Norms in plain PyTorch, and specs with norms after attention and MLP."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F

from slime.utils import accelerator


class TorchRMSNorm(torch.nn.Module):
    """Root-mean-square normalization over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Unlike megatron's torch norm it works under sequence parallelism. With ``layernorm_zero_centered_gamma`` the
    factor is ``1 + weight``. Raises ValueError for any other normalization (there the message says what to do).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"--normalization {config.normalization} needs TransformerEngine or apex, and neither is installed; "
                "without them only RMSNorm is available."
            )
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron sums the gradients of weights so marked over the tensor-parallel ranks, of which each normalizes
        # only its part of the sequence.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (unknown to torch)
        self.eps = eps
        self.shape = (hidden_size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` (``[..., hidden_size]``) normalized, in its own dtype."""
        if self.zero_centered:  # as everybody computes it: 1 + weight has few digits left of the weight in bf16
            return F.rms_norm(x.float(), self.shape, self.weight.float() + 1, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight.to(x.dtype), self.eps)


NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")


class PostNormTransformerLayer(TransformerLayer):
    """Megatron's layer with the norms ``post_norms`` (of NORMS), built of ``norm``."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(self, config: Any, *args: Any, norm: Any, post_norms: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in post_norms:
            setattr(self, name, norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon))
        if "post_self_attn_layernorm" in post_norms:
            self.self_attn_bda = normed_first(self.post_self_attn_layernorm, self.self_attn_bda)
        if "post_mlp_layernorm" in post_norms:
            self.mlp_bda = normed_first(self.post_mlp_layernorm, self.mlp_bda)


def normed_first(norm: torch.nn.Module, bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """Return megatron's bias-dropout-add with ``norm`` applied to what is added to the residual."""

    def build(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add = bias_dropout_add(training, fused)

        def normed(output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, p: float) -> Any:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, p)

        return normed

    return build


def with_post_norms(args: Namespace, block: Any) -> Any:
    """Return the block spec with the norms that the flags ask for; unchanged without them."""
    asked = tuple(name for name in NORMS if getattr(args, name, False))
    if asked:
        block.layer_specs = [
            ModuleSpec(
                PostNormTransformerLayer,
                params={**layer.params, "norm": block.layer_norm, "post_norms": asked},
                submodules=layer.submodules,
            )
            for layer in block.layer_specs
        ]
    return block
