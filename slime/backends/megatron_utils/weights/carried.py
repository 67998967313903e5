"""Tensors of a checkpoint that belong to parts which are not trained here; an export has them unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime.backends.megatron_utils.weights.hf_checkpoint import HfCheckpoint, read_config
from slime.backends.megatron_utils.weights.maps import Family


def carried_names(checkpoint: HfCheckpoint, family: Family) -> frozenset[str]:
    """Return the names of the tensors of ``checkpoint`` that the family's models are built without."""
    config = read_config(checkpoint.path)
    config = config.get("text_config", config)
    layers, predicting = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
    return frozenset(name for name in checkpoint.names if family.carries_hf(name, range(layers, layers + predicting)))


def write_carried(source: Path, target: Path, family: Family, written: Iterable[str]) -> tuple[dict[str, str], int]:
    """Copy what ``family`` carries of the checkpoint ``source`` to ``target``, but for the names ``written`` already.

    One file per file of the source: ``carried-00001.safetensors``... Return ``tensor name -> file``, and the bytes.
    """
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    size = 0
    with HfCheckpoint(source) as checkpoint:
        names = sorted(carried_names(checkpoint, family) - set(written))
        for number, path in enumerate(sorted({checkpoint.file_of(name) for name in names}), 1):
            file = f"carried-{number:05d}.safetensors"
            tensors = {n: checkpoint.slice(n)[:] for n in names if checkpoint.file_of(n) == path}
            save_file(tensors, target / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(tensors, file))
            size += sum(tensor.nbytes for tensor in tensors.values())
    return files, size
