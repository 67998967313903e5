"""GLM-4 (0414): biases on q, k and v, norms after attention and MLP, gate and up projection in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.weights.layouts import Dims, Layout, Replicated, Shape
from slime.backends.megatron_utils.weights.maps.parts import DENSE, QKV_BIAS, ROTARY_BUFFERS, layer_rule
from slime.backends.megatron_utils.weights.maps.rule import Family


class FusedGateUp(Layout):
    """One tensor, ``gate`` above ``up``; each rank holds its rows of ``gate`` above its rows of ``up``."""

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        return [(local[0] * tp_size, *local[1:])]

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        source = sources[0]
        rows = (source.get_shape() if hasattr(source, "get_shape") else source.shape)[0]
        half, block = rows // 2, rows // 2 // tp_size
        starts = (tp_rank * block, half + tp_rank * block)
        return torch.cat([source[start : start + block] for start in starts])

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for i in range(2) for half in halves])]


_FC1 = "mlp.linear_fc1.weight"
RULES = (
    *(rule for rule in DENSE if not rule.megatron[0].endswith(_FC1)),
    QKV_BIAS,
    layer_rule(_FC1, ("mlp.gate_up_proj.weight",), FusedGateUp()),
    layer_rule("post_self_attn_layernorm.weight", ("post_self_attn_layernorm.weight",), Replicated()),
    layer_rule("post_mlp_layernorm.weight", ("post_mlp_layernorm.weight",), Replicated()),
)

FAMILY = Family("glm4", ("glm4",), RULES, ROTARY_BUFFERS)
