"""Repairs of megatron-core for machines without TransformerEngine and apex, on any device.

Each repair is one function that first looks whether the installed megatron still has the fault and returns whether it
did something. A test fails when one of them found nothing to do, so that it can be removed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    from slime.utils.autograd import Context

_applied: tuple[str, ...] | None = None


def apply() -> tuple[str, ...]:
    """Apply every repair that the installed megatron needs, once per process; return the names of those applied."""
    global _applied
    if _applied is None:
        _applied = tuple(repair.__name__ for repair in PATCHES if repair())
    return _applied


def patch_router_gemm_name() -> bool:
    """Bind ``moe_utils.te_general_gemm``: without TransformerEngine the MoE router dies on this undefined name."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "te_general_gemm"):
        return False
    moe_utils.te_general_gemm = None  # what its users test for, and what the defining module falls back to
    return True


def patch_restoring_adam_step() -> bool:
    """Let DistributedOptimizer restore a torch Adam state.

    It copies every state tensor by name from the checkpoint; torch keeps ``step`` among them, while the checkpoint
    has it in the parameter groups: KeyError. ``load_state_dict`` has set the step already, so it is left alone.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if not restoring_adam_step_fails(original):
        return False

    @functools.wraps(original)
    def restore(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = restore
    return True


def patch_shared_adam_step() -> bool:
    """Give each parameter a separate ``step`` tensor after DistributedOptimizer.load_state_dict.

    It hands one tensor to all of them, so that each parameter's update advances everybody's step: after a resume the
    bias correction is silently wrong.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict
    if not loading_shares_adam_step(original):
        return False

    @functools.wraps(original)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict
    return True


def patch_state_of_no_parameters() -> bool:
    """Let DistributedOptimizer tell the state of an optimizer that holds no parameter on this rank.

    It wants all parameters to agree on one ``step``, and asserts that there is one: a pipeline stage without experts
    cannot save the (empty) optimizer of experts.
    """
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    original = DistributedOptimizer.state_dict
    if HAVE_APEX_OR_TE or not state_of_no_parameters_fails(original):
        return False

    @functools.wraps(original)
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        if self.optimizer.state:
            return original(self)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "step": group.get("step", 0)}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": {"param_groups": groups}, **scaler}

    DistributedOptimizer.state_dict = state_dict
    return True


def patch_recompute_without_fp8() -> bool:
    """Let ``--recompute-modules layernorm mlp ...`` recompute without fp8.

    Their checkpoints are made with the default ``fp8=False``, which counts as "not None", as fp8: without
    TransformerEngine the first of them dies on an undefined name.
    """
    from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__
    if HAVE_TE or not CheckpointWithoutOutput().fp8:
        return False

    @functools.wraps(original)
    def __init__(self: CheckpointWithoutOutput, fp8: object = None) -> None:
        original(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = __init__
    return True


def patch_latent_attention_class_names() -> bool:
    """Tell latent attention that TransformerEngine is absent: it looks only whether the wrappers' module imports.

    That module does, with mocks for the classes, so that ``isinstance(..., TELinear)`` raises TypeError.
    """
    from megatron.core.transformer import multi_latent_attention

    if not multi_latent_attention.HAVE_TE or isinstance(multi_latent_attention.TELinear, type):
        return False
    multi_latent_attention.HAVE_TE = False
    return True


def patch_norm_of_gradients() -> bool:
    """Compute the norm of all gradients on their device.

    The stand-in for TransformerEngine's kernel reads the norm of each parameter's gradient on the host: the host waits
    for the device once per parameter.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is not getattr(utils, "local_multi_tensor_l2_norm", None):
        return False
    clip_grads.l2_norm_impl = l2_norm
    return True


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors as one vector, fp32 [1]; the other arguments are those of the fused kernel."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def patch_packed_rotation() -> bool:
    """Look up the angles of a packing once per micro-batch.

    Megatron reads the lengths of the sequences on the host in every layer, twice for queries and twice for keys, and
    computes sines and cosines again: on an H200 448 of 853 waits for the device in a step of four micro-batches.
    """
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_thd
    if "tolist" not in original.__code__.co_names:
        return False
    rope_utils._apply_rotary_pos_emb_thd = rotating_packed(original)
    return True


PATCHES: tuple[Callable[[], bool], ...] = (
    patch_router_gemm_name,
    patch_latent_attention_class_names,
    patch_restoring_adam_step,
    patch_shared_adam_step,
    patch_state_of_no_parameters,
    patch_recompute_without_fp8,
    patch_norm_of_gradients,
    patch_packed_rotation,
)


def _stepped_adam() -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    """Return two parameters and the AdamW that has stepped them once."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": parameters, "wd_mult": 1.0, "lr_mult": 1.0}], lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def restoring_adam_step_fails(restore: Callable[..., None]) -> bool:
    """Return whether ``restore`` (DistributedOptimizer's method) raises KeyError for a checkpoint without ``step``."""
    parameters, optimizer = _stepped_adam()
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)
    owner = SimpleNamespace(
        optimizer=optimizer, config=config, model_param_group_index_map={parameters[0]: (0, 0), parameters[1]: (0, 1)}
    )
    tensors = {name: torch.ones(2) for name in ("param", "exp_avg", "exp_avg_sq")}
    try:
        with torch.no_grad():
            restore(owner, parameters[0], tensors)
    except KeyError:
        return True
    return False


def state_of_no_parameters_fails(state_dict: Callable[..., Any]) -> bool:
    """Return whether ``state_dict`` (DistributedOptimizer's method) raises for an optimizer without parameters."""
    optimizer = torch.optim.AdamW([{"params": []}], lr=0.1)
    try:
        state_dict(SimpleNamespace(optimizer=optimizer, grad_scaler=None))
    except AssertionError:
        return True
    return False


def loading_shares_adam_step(load_state_dict: Callable[..., None]) -> bool:
    """Return whether after ``load_state_dict`` (DistributedOptimizer's method) two parameters share a step tensor."""
    parameters, optimizer = load_at_step_three(load_state_dict)
    steps = [optimizer.state[parameter]["step"] for parameter in parameters]
    return steps[0] is steps[1]


def load_at_step_three(load_state_dict: Callable[..., None]) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    """Return two parameters and their AdamW after ``load_state_dict`` of a checkpoint of step 3."""
    from megatron.core.optimizer import distrib_optimizer

    parameters, optimizer = _stepped_adam()
    optimizer.param_groups[0].update(dict.fromkeys(distrib_optimizer.param_group_identifier_keys))
    group = {key: value for key, value in optimizer.state_dict()["param_groups"][0].items() if key != "params"}
    owner = SimpleNamespace(
        optimizer=optimizer,
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        config=SimpleNamespace(fp16=False),
        grad_scaler=None,
    )
    load_state_dict(owner, {"optimizer": {"param_groups": [{**group, "step": 3}]}})
    return parameters, optimizer


# Rotary embedding of packed sequences without TransformerEngine's kernel


def rotating_packed(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return megatron's ``_apply_rotary_pos_emb_thd`` that computes the angles of a packing once, not in every layer.

    Those that turn neighboring dimensions, or reorder them, are left to ``plain``.
    """

    @functools.wraps(plain)
    def rotate(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        if rotary_interleaved or multi_latent_attention or freqs.requires_grad:
            return plain(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        known = getattr(cu_seqlens, "_rotation", None)
        if known is None or known[0] is not freqs or known[1:3] != (mscale, t.dtype):
            angles = _packed_angles(t, cu_seqlens, freqs, cp_group)
            cos, sin = ((function(angles) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
            known = (freqs, mscale, t.dtype, cos, sin)
            setattr(cu_seqlens, "_rotation", known)  # noqa: B010  (unknown to torch)
        return _Rotation.apply(t, *known[3:])

    return rotate


def _packed_angles(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_group: torch.distributed.ProcessGroup) -> Tensor:
    """Return [tokens, 1, d]: of every token of this rank, as megatron looks them up."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    size, rank = cp_group.size(), cp_group.rank()
    bounds = cu_seqlens.tolist()
    lengths = [(end - start) // size for start, end in itertools.pairwise(bounds)]
    # A row for every token of the packing, or one for every position in a sequence.
    starts = bounds if freqs.size(0) == bounds[-1] else itertools.repeat(0)
    parts = [
        _get_thd_freqs_on_this_cp_rank(rank, size, x, freqs, start)
        for x, start in zip(t.detach().split(lengths), starts, strict=False)
    ]
    return torch.cat(parts).squeeze(1)


class _Rotation(torch.autograd.Function):
    """``[a * cos - b * sin, b * cos + a * sin]`` of the halves of the first ``d`` of the last dimension of [t, h, n].

    cos and sin are [t, 1, d]; the dimensions past ``d`` stay as they are.
    """

    @staticmethod
    def forward(ctx: Context, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        sin_a, sin_b = sin.chunk(2, -1)
        return _rotated(t, cos, sin_a, sin_b, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        sin_a, sin_b = sin.chunk(2, -1)
        return _rotated(grad, cos, sin_b, sin_a, -1), None, None


def _rotated(t: Tensor, cos: Tensor, sin_a: Tensor, sin_b: Tensor, sign: int) -> Tensor:
    """Return ``[a * cos_a - sign * b * sin_a, b * cos_b + sign * a * sin_b, rest]`` of ``t = [a, b, rest]``."""
    half = sin_a.size(-1)
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    turned, rest = t.split([2 * half, t.size(-1) - 2 * half], -1)
    out_turned, out_rest = out.split([2 * half, t.size(-1) - 2 * half], -1)
    torch.mul(turned, cos, out=out_turned)
    out_turned[..., :half].addcmul_(turned[..., half:], sin_a, value=-sign)
    out_turned[..., half:].addcmul_(turned[..., :half], sin_b, value=sign)
    out_rest.copy_(rest)
    return out
