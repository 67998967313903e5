"""Handle tensors that checkpoints of TransformerEngine's layers name differently than Megatron's, or have alone.

A norm is one weight under two names: TransformerEngine fuses it into the linear layer behind it where it can. Megatron
names the norms of its own layers likewise in checkpoints, but for those before experts, before linear attention and in
latent attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

PAIRS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)


def rename_to_stored(request: dict[str, Any], stored: Collection[str]) -> list[str]:
    """Ask for norms, and their optimizer states, by the names that a checkpoint has; return those names.

    ``request``: a nested state dict of Megatron's sharded tensors, changed in place. ``stored``: the names of all
    tensors of the checkpoint. What it has under neither name is left for Megatron to report.
    """
    renamed = []
    for tensor in _sharded(request):
        if tensor.key not in stored:
            for pair in (*PAIRS, *((b, a) for a, b in PAIRS)):
                name = tensor.key.replace(*pair)
                if name in stored:
                    tensor.key = name
                    renamed.append(name)
                    break
    return renamed


def take_unstored_states(request: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Take the states beside weights that a checkpoint lacks out of a model's request; return what they are now.

    TransformerEngine's layers have some, empty without FP8, that Megatron's own do not write.
    """
    absent = [key for key, part in request.items() if key.endswith("_extra_state") and part.unique_key not in stored]
    return {key: request.pop(key).data for key in absent}


def _sharded(part: object) -> Iterator[Any]:
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, list | tuple):
        for inner in part:
            yield from _sharded(inner)
    elif hasattr(part, "key") and hasattr(part, "replica_id"):
        yield part
