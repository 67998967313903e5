"""Check of the expert choices that engines report for routing replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError
from slime.batching.flops import moe_layer_pattern
from slime.utils.types import Sample


def validate_routed_experts(args: Any, samples: Sequence[Sample]) -> None:
    """Check every sample's experts: integers [len(tokens) - 1, num_layers, topk] of MoE layers that really routed.

    With topk > 1 distinct experts are chosen per token, so a MoE layer (by ``args.moe_layer_freq``) of zeros only was
    never filled in by the engine. Raises TrainDataError naming the sample.
    """
    layers, topk = args.num_layers, args.moe_router_topk
    is_moe = np.array(moe_layer_pattern(getattr(args, "moe_layer_freq", 1), layers), dtype=bool)
    for sample in samples:
        name = f"sample index={sample.index} rollout_id={sample.rollout_id}"
        experts = sample.rollout_routed_experts
        shape = None if experts is None else tuple(np.shape(experts))
        if shape is None or len(shape) != 3 or shape[1:] != (layers, topk) or 0 in shape:
            raise TrainDataError(
                f"Invalid rollout routed-experts shape {shape} of {name}: expected (tokens - 1, {layers} layers, "
                f"top-{topk}) with {len(sample.tokens)} tokens"
            )
        if topk > 1:
            silent = is_moe & ~np.asarray(experts).astype(bool).any(axis=(0, 2))
            if silent.any():
                raise TrainDataError(
                    f"routed experts of {name} are all zero in MoE layers {np.flatnonzero(silent).tolist()}: the "
                    "engine did not record them"
                )
