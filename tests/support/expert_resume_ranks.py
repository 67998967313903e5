"""Ranks of the tests of checkpoints with experts."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from slime.utils import digests
from tests.support.ranks import new_trainer
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_weights, train_once


def resume_everywhere(
    checkpoint: str, folder: str, layouts: dict[str, dict[str, Any]], pairs: dict[str, list[str]]
) -> dict[str, Any]:
    """Save under each of ``pairs`` after a rollout, continue; load under each of its layouts, save again, continue.

    Returns name -> {"steps": of the second rollout, "weights" after it, "directory": of the checkpoint after the first
    one}; a name is "<saved under>" or "<saved under> -> <loaded under>". Flags may have "unmarked": whether experts
    share an optimizer with the rest, as Megatron has it where it does not divide them; and "te_names": whether the
    checkpoint that is loaded has the names of TransformerEngine's layers, and attention a state that it has not.
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
    from slime.backends.megatron_utils.model import experts
    from slime.backends.megatron_utils.model.attention import TorchCoreAttention

    flags = dict(flags)
    with contextlib.ExitStack() as stack:
        if flags.pop("unmarked", False):
            stack.enter_context(patch.object(experts, "mark_routed_experts", lambda model: None))
        if flags.pop("te_names", False):
            load = with_te_names(str(load), f"{save} source")
            state = {"get_extra_state": lambda self: torch.empty(0), "set_extra_state": lambda self, found: None}
            stack.enter_context(patch.multiple(TorchCoreAttention, **state))
        source = {} if load is None else {"load": load}
        trainer, start = new_trainer(checkpoint, save=save, adam_eps=1e-3, lr=1e-2, **source, **flags)
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


def with_te_names(source: str, target: str) -> str:
    """Copy the checkpoint, with the norms before experts named as TransformerEngine's layers name them."""
    if torch.distributed.get_rank() == 0:
        shutil.copytree(source, target)
        file = Path(target) / "iter_0000000" / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        norm = re.compile(r"(layers\.\d+\.)mlp\.linear_fc1\.layer_norm_weight$")
        sparse = {
            m[1] for m in (re.search(r"(layers\.\d+\.)mlp\.experts", k) for k in metadata.state_dict_metadata) if m
        }

        def named(key: str) -> str:
            found = norm.search(key)
            return norm.sub(r"\1pre_mlp_layernorm.weight", key) if found and found[1] in sparse else key

        stored = {named(key): value for key, value in metadata.state_dict_metadata.items()}
        assert len(stored.keys() - metadata.state_dict_metadata.keys()) >= len(sparse) > 0
        metadata.state_dict_metadata = stored
        metadata.storage_data = {
            dataclasses.replace(index, fqn=named(index.fqn)): place for index, place in metadata.storage_data.items()
        }
        file.write_bytes(pickle.dumps(metadata))
        listed = digests.read(file.parent)
        assert listed is not None
        digests.write(file.parent, {**listed.files, file.name: digests.digest(file)}, listed.beside)
    torch.distributed.barrier()
    return target


def plain_tensors(directories: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of checkpoints by name, whole (on one process)."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from megatron.core import dist_checkpointing

    torch.distributed.init_process_group("gloo")
    return [_flat(dist_checkpointing.load_plain_tensors(directory)) for directory in directories]


def _flat(values: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if torch.is_tensor(values):
        return {prefix: values}
    found: dict[str, torch.Tensor] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
