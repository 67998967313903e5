"""Which modules a transformer layer is made of. Import after ``import_megatron()``."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from slime.backends.megatron_utils.attention import TorchCoreAttention, fix_mla_tp_gradients
from slime.backends.megatron_utils.experts import GroupedExperts
from slime.backends.megatron_utils.norms import TorchRMSNorm, with_post_norms
from slime.utils import accelerator

logger = logging.getLogger(__name__)


def use_transformer_engine(args: Namespace) -> bool:
    """Return whether the layers are TransformerEngine's: installed, on CUDA, and not ``--transformer-impl local``."""
    wanted = args.transformer_impl != "local"
    return wanted and gpt_layer_specs.HAVE_TE and accelerator.device_type() == "cuda"


def decoder_block_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of this pipeline stage's layers.

    TransformerEngine's where :func:`use_transformer_engine`; otherwise megatron's local one with core attention, norms
    and routed experts exchanged for those of this package.
    """
    with_te = use_transformer_engine(args)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=with_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    block = block if with_te else _with_torch_modules(block)
    return with_post_norms(args, fix_mla_tp_gradients(block, duplicate=not with_te))


def _with_torch_modules(block: Any) -> Any:
    block.layer_norm = TorchRMSNorm
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = TorchCoreAttention
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            current = getattr(attention, name, None)
            if current not in (None, IdentityOp, gpt_layer_specs.L2Norm):
                setattr(attention, name, TorchRMSNorm)
        experts = getattr(parts.mlp, "submodules", None)
        if isinstance(experts, MoESubmodules):
            experts.experts = ModuleSpec(module=GroupedExperts)
            logger.info("routed experts: one matrix product each, grouped kernel not available")
    return block


def mtp_block_spec(args: Namespace, config: Any) -> Any:
    """Return the spec of ``--mtp-num-layers`` MTP layers: each has a layer like the last one.

    Where some layers have linear attention these have full attention, which is the built-in layer.
    """
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from slime.backends.megatron_utils.mtp_model import MTPLayer

    with_te = use_transformer_engine(args)
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(config, with_te, config.normalization, config.qk_l2_norm)
    block = TransformerBlockSubmodules(layer_specs=layers[-1:])
    block = block if with_te else _with_torch_modules(block)
    block = with_post_norms(args, fix_mla_tp_gradients(block, duplicate=not with_te))
    layer = get_mtp_layer_spec(block.layer_specs[0], with_te)
    layer.module = MTPLayer
    if not with_te:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchRMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * args.mtp_num_layers)
