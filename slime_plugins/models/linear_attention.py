"""Models with gated delta nets (linear attention) in some layers and gated attention in the others."""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slime.arguments.args import Args
from slime.models.shape import gated_delta_net
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
"""Fields of the same name in configs of checkpoints and Megatron's."""


class Weight(torch.nn.Module):
    """A linear layer, or what has a ``weight`` like one."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T``."""
        return F.linear(x, self.weight)


class GatedDeltaNet(torch.nn.Module):
    """A tensor-parallel rank's part of a gated delta net: a share of its key heads, and the value heads of these.

    The parameters have the names and the order of transformers' modules (Qwen3.5; with ``fused`` Qwen3-Next, whose
    projections have the heads one after the other). Every rank has the whole norm. Under context parallelism a rank
    computes a share of these heads for the whole sequences; when their number cannot be divided, all of them.
    """

    def __init__(self, config: TransformerConfig, backend: str, *, fused: bool) -> None:
        super().__init__()
        from megatron.core import parallel_state as mpu

        from slime.backends.megatron_utils.model.delta_rule import kernel_for

        self.config, self.fused = config, fused
        self.kernel = kernel_for(backend, accelerator.device_type())
        self.sizes = sizes = gated_delta_net(vars(config).get)
        self.tp_group, self.cp_group = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
        tp = self.tp_group.size()
        if sizes.key_heads % tp:
            raise ValueError(
                f"--tensor-model-parallel-size is {tp}, but the {sizes.key_heads} key heads of the gated delta nets "
                "must be divided among these ranks"
            )
        self.heads, self.shared = sizes.key_heads // tp, sizes.value_heads // sizes.key_heads
        keys, values, gates = sizes.keys // tp, sizes.values // tp, sizes.value_heads // tp
        self.rows = [keys, keys, values]
        self.dt_bias = self._parameter(gates, fill=torch.ones)
        self.A_log = self._parameter(gates, fill=lambda *size, **kw: torch.empty(*size, **kw).uniform_(1, 16).log())
        self.conv1d = self._linear(sum(self.rows), 1, sizes.kernel)
        self.norm = Weight(torch.nn.Parameter(torch.ones(sizes.value_dim, **self._where())))
        projections = {"qkv": sum(self.rows), "z": values, "b": gates, "a": gates}
        if fused:
            projections = {"qkvz": sum(self.rows) + values, "ba": 2 * gates}
        for name, rows in projections.items():
            self.add_module(f"in_proj_{name}", self._linear(rows, config.hidden_size))
        self.out_proj = self._linear(config.hidden_size, values, dim=1)

    def _where(self) -> dict[str, Any]:
        device = "cpu" if self.config.use_cpu_initialization else accelerator.current_device()
        return {"dtype": self.config.params_dtype, "device": device}

    def _parameter(self, *size: int, fill: Any = torch.empty, dim: int = 0) -> torch.nn.Parameter:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        with get_cuda_rng_tracker().fork():  # other numbers on each tensor-parallel rank
            parameter = torch.nn.Parameter(fill(*size, **self._where()))
            if len(size) > 1 and self.config.perform_initialization:
                self.config.init_method(parameter)
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)
        return parameter

    def _linear(self, *size: int, dim: int = 0) -> Weight:
        return Weight(self._parameter(*size, dim=dim))

    def forward(self, x: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        """Return this rank's summand of the output ``[t, hidden]`` for tokens ``[t, hidden]`` of its CP part."""
        from slime.backends.megatron_utils.model.attention import SummedGradient, sequence_lengths
        from slime.backends.megatron_utils.model.delta_rule import (
            by_kernel,
            causal_convolution,
            gated_delta_rule,
        )

        lengths = sequence_lengths(packed_seq_params)
        exchange = HeadExchange(self.cp_group, lengths, self.heads, x.device)
        mixed, z = self._project(x)
        mixed = exchange.to_sequences(mixed)
        channels, *gates = mixed.split([self._channels, self.shared, self.shared], dim=-1)
        convolved = causal_convolution(channels.flatten(1), exchange.own(self._conv_by_head()).flatten(0, 1), lengths)
        convolved = F.silu(convolved).view_as(channels)
        q, k, v = convolved.split(self._split, dim=-1)
        v = v.unflatten(-1, (self.shared, self.sizes.value_dim))
        decay, bias = (exchange.own(p.view(self.heads, self.shared)) for p in (self.A_log, self.dt_bias))
        g = -decay.float().exp() * F.softplus(gates[1].float() + bias)
        rule = gated_delta_rule if self.kernel is None else functools.partial(by_kernel, self.kernel)
        out = exchange.to_tokens(rule(q, k, v, g, gates[0].sigmoid(), lengths).flatten(2))
        weight: Tensor = self.norm.weight
        if self.tp_group.size() > 1:
            weight = SummedGradient.apply(weight, self.tp_group)
        out = _gated_norm(out.unflatten(-1, (self.shared, -1)), z, weight, self.config.layernorm_epsilon)
        projected: Tensor = self.out_proj(out.flatten(1))
        return projected

    @property
    def _split(self) -> list[int]:
        return [self.sizes.key_dim, self.sizes.key_dim, self.shared * self.sizes.value_dim]

    @property
    def _channels(self) -> int:
        return sum(self._split)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[q, k, v, b, a]`` of each key head ``[t, heads, n]``, and the gates ``z [t, heads, shared, dv]``."""
        projected = {
            name: module(x).unflatten(-1, (self.heads, -1)) if name != "in_proj_qkv" else module(x)
            for name, module in self.named_children()
            if name.startswith("in_proj_")
        }
        if self.fused:
            qkv, z = projected["in_proj_qkvz"].split([self._channels, self._split[-1]], dim=-1)
            mixed = [qkv, projected["in_proj_ba"]]
        else:
            rows = projected["in_proj_qkv"].split(self.rows, dim=-1)
            parts, z = [part.unflatten(-1, (self.heads, -1)) for part in rows], projected["in_proj_z"]
            mixed = [*parts, projected["in_proj_b"], projected["in_proj_a"]]
        return torch.cat(mixed, dim=-1), z.unflatten(-1, (self.shared, -1))

    def _conv_by_head(self) -> Tensor:
        """Return the weight of the convolution, ``[heads, channels of q, k and v, 1, width]``."""
        parts = self.conv1d.weight.split(self.rows)
        return torch.cat([part.unflatten(0, (self.heads, -1)) for part in parts], dim=1)


class HeadExchange:
    """Tokens of all heads for whole sequences of some heads, among context-parallel ranks: one all-to-all each way."""

    def __init__(self, group: Any, lengths: list[int], heads: int, device: torch.device) -> None:
        self.group, self.size, self.divides = group, group.size(), heads % group.size() == 0
        if self.size > 1:
            self.order, self.inverse = _zigzag(tuple(lengths), self.size, device)

    def own(self, of_heads: Tensor) -> Tensor:
        """Return the part of the heads that this rank computes, of a tensor ``[heads, ...]``."""
        return of_heads.chunk(self.size)[self.group.rank()] if self.size > 1 and self.divides else of_heads

    def to_sequences(self, x: Tensor) -> Tensor:
        """``[t, heads, n]`` of this rank's tokens -> ``[all tokens, own heads, n]``, sequence after sequence."""
        from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region

        if self.size == 1:
            return x
        if not self.divides:  # each rank computes the loss of its tokens alone: gradients are summed over the ranks
            return gather_from_sequence_parallel_region(
                x.contiguous(), tensor_parallel_output_grad=True, group=self.group
            )[self.order]
        parts = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        return all_to_all(self.group, parts.flatten(0, 1))[self.order]

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo ``to_sequences``."""
        from megatron.core.tensor_parallel.mappings import all_to_all

        if self.size == 1:
            return x
        x = x[self.inverse]
        if not self.divides:
            return x.chunk(self.size)[self.group.rank()]
        return all_to_all(self.group, x).unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)


@functools.lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same
def _zigzag(lengths: tuple[int, ...], cp_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where each token of the sequences is among the ranks' parts, one after the other, and the inverse."""
    from slime.backends.megatron_utils.model.attention import undo_zigzag

    local = [length // cp_size for length in lengths]
    ranks = [part.split(local) for part in torch.arange(sum(lengths)).chunk(cp_size)]
    order = torch.cat([undo_zigzag(parts) for parts in zip(*ranks, strict=True)])
    return order.to(device), order.argsort().to(device)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` normalized over its last dimension, times ``weight`` and the ``silu`` of the gate."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


class LinearAttention(torch.nn.Module):
    """The self-attention of a layer: :class:`GatedDeltaNet` with Megatron's sequence parallelism and checkpoints."""

    def __init__(self, args: Args, config: TransformerConfig, layer_number: int, *, fused: bool, **_: object) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.linear_attn = GatedDeltaNet(config, args.qwen_gdn_backend, fused=fused)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``(output [t, 1, hidden], None)`` for this rank's part ``[t, 1, hidden]`` of the pack."""
        from megatron.core.tensor_parallel import mappings

        from slime.backends.megatron_utils.model.attention import SummedGradient

        if packed_seq_params is None:
            raise ValueError(f"{type(self).__name__} takes packed sequences only, and got none")
        if self.config.sequence_parallel:
            hidden_states = mappings.gather_from_sequence_parallel_region(hidden_states)
        elif self.linear_attn.tp_group.size() > 1:
            hidden_states = SummedGradient.apply(hidden_states, self.linear_attn.tp_group)
        output = self.linear_attn(hidden_states.squeeze(1), packed_seq_params).unsqueeze(1)
        if self.config.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(output), None
        return mappings.reduce_from_tensor_model_parallel_region(output), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the tensors of Megatron's checkpoints: whole, in the order of transformers, whatever the layout."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        net, axes = self.linear_attn, {}
        for name, parameter in self.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                axes[name] = getattr(parameter, "partition_dim")  # noqa: B009  (unknown to torch)
        found = make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, axes, sharded_offsets)
        if net.tp_group.size() > 1:
            for name in ("conv1d", *(() if net.fused else ("in_proj_qkv",))):
                key = f"{prefix}linear_attn.{name}.weight"
                found[key] = _in_segments(found[key], net.rows, net.tp_group, sharded_offsets)
        return found


def _in_segments(whole: Any, rows: list[int], group: Any, sharded_offsets: tuple[Any, ...]) -> Any:
    """Return the factory of a tensor's stored shards; its segments of ``rows`` are each divided over ``group``."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    unit, axis = math.gcd(*rows), len(sharded_offsets)
    pieces = sum(rows) // unit * group.size()
    starts = [sum(rows[:i]) * group.size() + group.rank() * n for i, n in enumerate(rows)]
    places = [(start + row) // unit for start, n in zip(starts, rows, strict=True) for row in range(0, n, unit)]

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        return [
            ShardedTensor.from_rank_offsets(
                key, piece, *sharded_offsets, (axis, place, pieces), replica_id=replica_id, prepend_axis_num=axis
            )
            for piece, place in zip(tensor.split(unit), places, strict=True)
        ]

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def hybrid_block_spec(args: Args, config: TransformerConfig, vp_stage: int | None, *, fused: bool) -> Any:
    """Return the block spec of this pipeline stage: linear attention where the checkpoint's ``layer_types`` say so.

    ``fused``: see :class:`GatedDeltaNet`. Raises ValueError when the checkpoint has another number of layers than the
    flags.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from transformers import AutoConfig

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec

    trust = {"trust_remote_code": args.trust_remote_code}
    hf_config = AutoConfig.from_pretrained(args.hf_checkpoint, **trust).get_text_config()
    kinds = hf_config.layer_types
    if len(kinds) != config.num_layers:
        raise ValueError(f"{args.hf_checkpoint} has {len(kinds)} layers, --num-layers is {config.num_layers}")
    for name in SIZES:
        setattr(config, name, getattr(hf_config, name))
    config.hetereogenous_dist_checkpoint = True  # Megatron's word: layers are not stacked in checkpoints
    block = decoder_block_spec(args, config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for i, layer in enumerate(block.layer_specs):
        if kinds[first + i] == "linear_attention":
            layer = block.layer_specs[i] = copy.deepcopy(layer)
            # TransformerEngine's attention has the norm before it inside; this one has not.
            layer.submodules.input_layernorm = block.layer_norm
            layer.submodules.self_attention = ModuleSpec(LinearAttention, params={"args": args, "fused": fused})
    return block
