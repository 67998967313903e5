"""Modules that a transformer layer is made of, and its norms in plain PyTorch. Import after ``import_megatron()``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.attention import TorchCoreAttention, fix_mla_tp_gradients
from slime.backends.megatron_utils.model.experts import GroupedExperts
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.utils.autograd import Context

logger = logging.getLogger(__name__)

NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")


class TorchRMSNorm(torch.nn.Module):
    """Root-mean-square normalization over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Unlike megatron's torch norm it works under sequence parallelism. With ``layernorm_zero_centered_gamma`` the
    factor is ``1 + weight``. Raises ValueError for any other normalization (there the message says what to do).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
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
            return rms_norm(x.float(), self.weight.float() + 1, self.eps).to(x.dtype)
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; on a CPU in few passes over ``x``."""
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):
        return _CpuRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _CpuRMSNorm(torch.autograd.Function):
    """With ``r = 1 / sqrt(mean(x^2) + eps)``: ``dx = r w g - x r^3 mean(w g x)`` and ``dw = sum_rows r g x``.

    torch composes norm and gradient of twelve operators on a CPU. Here the two sums over ``g x`` are products of it
    with a vector.
    """

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        width = x.size(-1)
        both = g * x
        rows = both.reshape(-1, width)
        grad_weight = torch.mv(rows.t(), r.reshape(-1)) if ctx.needs_input_grad[1] else None
        shares = torch.mv(rows, weight).view(r.shape).mul_(r).mul_(r).mul_(r).div_(-width)
        return torch.mul(g, weight, out=both).mul_(r).addcmul_(x, shares), grad_weight, None


class PostNormTransformerLayer(TransformerLayer):
    """Megatron's layer with the norms ``post_norms`` (of NORMS), built of ``norm``."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        norm: Callable[..., torch.nn.Module],
        post_norms: tuple[str, ...],
        **kwargs: object,
    ) -> None:
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


def with_post_norms(args: Args, block: TransformerBlockSubmodules) -> Any:
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


def use_transformer_engine(args: Args) -> bool:
    """Return whether the layers are TransformerEngine's: installed, on CUDA, and not ``--transformer-impl local``."""
    wanted = args.transformer_impl != "local"
    return wanted and gpt_layer_specs.HAVE_TE and accelerator.device_type() == "cuda"


def decoder_block_spec(args: Args, config: TransformerConfig, vp_stage: int | None = None) -> Any:
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


def _with_torch_modules(block: TransformerBlockSubmodules) -> Any:
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


def mtp_block_spec(args: Args, config: TransformerConfig) -> Any:
    """Return the spec of ``--mtp-num-layers`` MTP layers: each has a layer like the last one.

    Where some layers have linear attention these have full attention, which is the built-in layer.
    """
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from slime.backends.megatron_utils.model.mtp_model import MTPLayer

    with_te = use_transformer_engine(args)
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(config, with_te, config.normalization, config.qk_l2_norm)
    block = TransformerBlockSubmodules(layer_specs=layers[-1:])
    block = block if with_te else _with_torch_modules(block)
    block = with_post_norms(args, fix_mla_tp_gradients(block, duplicate=not with_te))
    layer = get_mtp_layer_spec(block.layer_specs[0], with_te)
    layer.module = MTPLayer
    if not with_te:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchRMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * (args.mtp_num_layers or 0))
