"""What the ranks of the tests of checkpoints with experts do."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_weights, new_trainer, train_once


def resume_everywhere(
    checkpoint: str, folder: str, layouts: dict[str, dict[str, Any]], pairs: dict[str, list[str]]
) -> dict[str, Any]:
    """Save under each of ``pairs`` after a rollout, go on; load under each of its layouts, save again, go on.

    Returns name -> {"steps": of the second rollout, "weights" after it, "directory": of the checkpoint after the first
    one}; a name is "<saved under>" or "<saved under> -> <loaded under>". Flags may have "unmarked": whether experts
    share an optimizer with the rest, as Megatron has it where it does not divide them.
    """
    found: dict[str, Any] = {}
    for saved, others in pairs.items():
        found[saved] = _rollout(checkpoint, f"{folder}/{saved}", layouts[saved], load=None)
        for loaded in others:
            name = f"{saved} -> {loaded}"
            found[name] = _rollout(checkpoint, f"{folder}/{name}", layouts[loaded], load=f"{folder}/{saved}")
    return found


def _rollout(checkpoint: str, save: str, flags: dict[str, Any], load: str | None) -> dict[str, Any]:
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from slime.backends.megatron_utils import experts

    mark, flags = experts.mark_routed_experts, dict(flags)
    if flags.pop("unmarked", False):
        experts.mark_routed_experts = lambda model: None
    try:
        source = {} if load is None else {"load": load}
        trainer, start = new_trainer(checkpoint, save=save, adam_eps=1e-3, lr=1e-2, **source, **flags)
    finally:
        experts.mark_routed_experts = mark
    if load is None:
        train_once(trainer, 0, make_train_data(seed=0))
    assert start == (0 if load is None else 1)
    trainer.save(0, force_sync=True)
    report = train_once(trainer, 1, make_train_data(seed=1))
    return {
        "steps": report["steps"],
        "weights": hf_weights(trainer.model, trainer.args),
        "directory": f"{save}/iter_0000000",
    }


def plain_tensors(directories: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of checkpoints by name, whole (on one process)."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    return [_flat(dist_checkpointing.load_plain_tensors(directory)) for directory in directories]


def _flat(values: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if torch.is_tensor(values):
        return {prefix: values}
    found: dict[str, torch.Tensor] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
