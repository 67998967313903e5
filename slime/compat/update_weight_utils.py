"""Old path of what sends weights to engines; that is the package ``slime.weight_sync`` now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.weights.naming import global_named_parameters
from slime.utils.moved import moved, warn_moved

__all__ = ["UpdateWeightFromDistributed", "UpdateWeightFromTensor", "named_parameters"]  # noqa: F822

_OLD = "slime.backends.megatron_utils.update_weight_utils"
__getattr__ = moved(
    _OLD,
    {
        "UpdateWeightFromDistributed": "slime.weight_sync.named_updaters.UpdateWeightFromDistributed",
        "UpdateWeightFromTensor": "slime.weight_sync.named_updaters.UpdateWeightFromTensor",
    },
)


def named_parameters(args: Args, model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters as (``module.module.`` + name with layers counted over the whole model, tensor)."""
    del args
    new = f"{global_named_parameters.__module__}.{global_named_parameters.__name__}"
    warn_moved(f"{_OLD}.named_parameters", new)
    return ((f"module.module.{name}", parameter) for name, parameter in global_named_parameters(model))
