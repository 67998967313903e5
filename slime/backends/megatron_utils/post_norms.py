"""Layers with norms on the outputs of attention and MLP, before the residual sums. Import after ``import_megatron()``.

``--post-self-attn-layernorm`` and ``--post-mlp-layernorm`` (GLM-4): ``x + norm(attention(norm(x)))``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")


class PostNormTransformerLayer(TransformerLayer):
    """Megatron's layer with the norms ``post_norms`` (of NORMS), built of ``norm``."""

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
