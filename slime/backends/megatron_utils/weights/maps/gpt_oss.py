"""gpt-oss: biases everywhere, attention sinks, stacked experts with gate and up projection row by row in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.weights.layouts import (
    ColumnParallel,
    Dims,
    Replicated,
    RowParallel,
    Transposed,
)
from slime.backends.megatron_utils.weights.maps.parts import (
    DENSE,
    QKV_BIAS,
    ROTARY_BUFFERS,
    expert_names,
    layer_rule,
    router,
    stacked_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family


class InterleavedGateUp(ColumnParallel):
    """One tensor whose rows are in turns one of ``gate``, one of ``up``; a rank holds its ``gate`` above its ``up``."""

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return super().shard(sources, tp_rank, tp_size, dims).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [torch.cat([torch.stack(shard.chunk(2), 1).flatten(0, 1) for shard in shards])]


RULES = (
    *(rule for rule in DENSE if ".mlp." not in rule.megatron[0]),
    QKV_BIAS,
    layer_rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), Replicated()),
    layer_rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), ColumnParallel()),
    router("mlp.router.weight"),
    layer_rule("mlp.router.bias", ("mlp.router.bias",), Replicated()),
    # For products from the left: [experts, inputs, outputs].
    *stacked_experts(Transposed(InterleavedGateUp()), Transposed(RowParallel())),
    layer_rule(expert_names("linear_fc1", "bias"), ("mlp.experts.gate_up_proj_bias",), InterleavedGateUp()),
    layer_rule(expert_names("linear_fc2", "bias"), ("mlp.experts.down_proj_bias",), Replicated()),
)

FAMILY = Family("gpt_oss", ("gpt_oss",), RULES, ROTARY_BUFFERS)
