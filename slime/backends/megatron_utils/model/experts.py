"""The routed experts of a layer without grouped-GEMM kernels: one module, plain matrix products, any device.

Parameters have the names of TransformerEngine's grouped experts, and checkpoints the keys of all of megatron's experts.
Import after ``import_megatron()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import (
    divide,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch.nn import functional as F

from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

ROUTED_EXPERTS = ".mlp.experts."


class GroupedLinear(torch.nn.Module):
    """The weights ``weight0, weight1, ...`` of one linear layer of every local expert, each ``[out, in]``.

    ``split`` is the dimension that is cut over the expert-tensor-parallel ranks; ``stride`` is 2 where a rank holds the
    halves of a gated layer one above the other. With ``--add-bias-linear`` also ``bias0, bias1, ...``, each ``[out]``:
    where inputs are cut (``split`` 1) all these ranks hold them whole, and add a share each.
    """

    def __init__(
        self,
        config: TransformerConfig,
        shape: tuple[int, int],
        count: int,
        *,
        split: int,
        stride: int = 1,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__()
        self.count, self.split, self.with_bias = count, split, config.add_bias_linear
        self.shares = group.size() if split == 1 else 1
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for i in range(count):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=split, stride=stride)
            self.register_parameter(f"weight{i}", weight)
            if self.with_bias:
                bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype, device=device))
                # Norms of gradients count what ranks hold several times on the rank where it is marked.
                own = split == 0 or group.rank() == 0
                set_tensor_model_parallel_attributes(bias, is_parallel=own, dim=0, stride=stride)
                self.register_parameter(f"bias{i}", bias)

    def weights(self) -> list[torch.nn.Parameter]:
        """Return the weights in the order of the local experts."""
        return [getattr(self, f"weight{i}") for i in range(self.count)]

    def bias(self, number: int) -> torch.Tensor | None:
        """Return what this rank adds of the bias of the local expert ``number``; its gradient is that of the whole."""
        bias: torch.Tensor | None = getattr(self, f"bias{number}", None)
        if bias is None or self.shares == 1:
            return bias
        return bias.detach() / self.shares + (bias - bias.detach())

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the tokens ``x [tokens, in]`` of the local expert ``number``."""
        output = F.linear(x, getattr(self, f"weight{number}"), self.bias(number))
        adapter: Any = self._modules.get("adapter")  # of --lora-rank
        return output if adapter is None or not adapter.enabled else output + adapter.expert(number, x)

    def initialize(self, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Fill the weights with random numbers that differ between the ranks of the experts' groups."""
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for weight in self.weights():
                init_method(weight)


class GroupedExperts(MegatronModule):
    """Gated or plain two-layer MLPs, one per local expert; a drop-in for megatron's ``SequentialMLP``.

    The token dispatcher exchanges tokens between all ranks that hold parts of an expert, before and after: each rank
    multiplies with its own shards, and there is no communication in here.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: object = None, pg_collection: Any = None
    ) -> None:
        super().__init__(config=config)
        if config.moe_latent_size is not None:
            raise ValueError("--moe-latent-size needs TransformerEngine; leave it out")
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden, ffn = config.hidden_size, divide(config.moe_ffn_hidden_size, self.tp_group.size())
        halves = 2 if config.gated_linear_unit else 1
        count, group = num_local_experts, self.tp_group
        self.linear_fc1 = GroupedLinear(config, (halves * ffn, hidden), count, split=0, stride=halves, group=group)
        self.linear_fc2 = GroupedLinear(config, (hidden, ffn), count, split=1, group=group)
        # With CUDA the fused activation is compiled, and would be again for every other number of tokens. A bias of
        # the second layer is multiplied by the token's probability too, so that goes onto the output.
        fusable = config.bias_activation_fusion and _is_swiglu(config) and not config.add_bias_linear
        self._fused = fusable and accelerator.device_type() != "cuda"
        if config.perform_initialization:
            self.linear_fc1.initialize(config.init_method)
            self.linear_fc2.initialize(config.output_layer_init_method)

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return ``([tokens, hidden], None)``: each token's expert's output, times its probability.

        ``hidden [tokens, hidden]`` and ``probs [tokens]`` are sorted by expert, ``tokens_per_expert [local experts]``
        counts them. An expert without tokens is computed all the same, so that its weights get a gradient (of zero):
        gradient reduction that overlaps with the backward pass waits for one from every parameter.
        """
        counts = tokens_per_expert.tolist()
        if self.config.moe_apply_probs_on_input:
            hidden, probs = (hidden * probs.unsqueeze(-1)).to(hidden.dtype), torch.ones_like(probs)
        parts = zip(range(self.num_local_experts), hidden.split(counts), probs.split(counts), strict=True)
        return torch.cat([self._expert(*part) for part in parts]), None

    def _expert(self, number: int, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        x, weights = self.linear_fc1.expert(number, hidden), probs.unsqueeze(-1)
        if self._fused:
            return self.linear_fc2.expert(number, weighted_bias_swiglu_impl(x, None, weights))
        if self.config.add_bias_linear:
            return (self.linear_fc2.expert(number, self._activation(x)) * weights).to(hidden.dtype)
        return self.linear_fc2.expert(number, (self._activation(x) * weights).to(hidden.dtype))

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, linear = x.chunk(2, dim=-1)
        limit = config.activation_func_clamp_value
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
        return config.activation_func(gate) * (linear + config.glu_linear_offset)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass itself."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return weights and biases as slices ``[expert]`` of one global tensor each per layer.

        The keys are those of megatron's grouped and sequential experts, so that their checkpoints are interchangeable.
        """
        total, first = self.ep_group.size() * self.num_local_experts, self.ep_group.rank() * self.num_local_experts
        state: dict[str, Any] = {}
        for name in ("linear_fc1", "linear_fc2"):
            linear: GroupedLinear = getattr(self, name)
            for own, parameter in linear.named_parameters(recurse=False):
                kind = own.rstrip("0123456789")
                offsets = (*sharded_offsets, (len(sharded_offsets), first + int(own.removeprefix(kind)), total))
                # Of the ranks with the same experts one writes.
                options = {"prepend_offsets": offsets, "tp_group": self.tp_group, "dp_cp_group": self.dp_group}
                key = f"{prefix}experts.{name}.{kind}"
                if kind == "bias" and linear.split == 1:
                    state[f"{prefix}{name}.{own}"] = make_sharded_tensor_for_checkpoint(parameter, key, **options)
                    continue
                tensor = make_tp_sharded_tensor_for_checkpoint(parameter, key, tp_axis=linear.split, **options)
                if name == "linear_fc1" and self.config.gated_linear_unit:
                    tensor = apply_swiglu_sharded_factory(tensor, offsets)
                state[f"{prefix}{name}.{own}"] = tensor
        return state


def _is_swiglu(config: TransformerConfig) -> bool:
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    return plain and config.gated_linear_unit and config.activation_func is F.silu


def mark_routed_experts(model: torch.nn.Module) -> None:
    """Have the gradients of routed experts reduced over the ranks with the same experts, in every layout.

    Megatron's modules ask for it only when experts are divided (``expert_model_parallel_size > 1``). With an
    expert-tensor-parallel size other than the tensor-parallel size these ranks are others than those of the rest of
    the model as well, and gradients would silently lack the tokens of some. Where the ranks are the same experts are
    marked too: they have a separate optimizer then in every layout, so that checkpoints of all layouts are alike.
    Call before the model is wrapped for data parallelism.
    """
    for name, parameter in model.named_parameters():
        if ROUTED_EXPERTS in name:
            parameter.allreduce = False  # type: ignore[attr-defined]  # megatron's name for "an ordinary parameter"


def router_buffers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Return ``(router, name, buffer)`` of every router: biases of experts and counts of tokens, which are fp32.

    ``Float16Module`` rounds them with the weights. Megatron makes the biases fp32 again in the first forward, when the
    checkpoint's have been rounded already, and host copies of the weights keep rounding them.
    """
    return [
        (module, name, buffer)
        for module in model.modules()
        if isinstance(module, TopKRouter)
        for name, buffer in module.named_buffers(recurse=False)
    ]
