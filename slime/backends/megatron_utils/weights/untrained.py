"""Tensors of a checkpoint that belong to parts which are not trained here; an export has them unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.weights.maps import Family
from slime.weights.hf.checkpoint import HfCheckpoint, read_config
from slime.weights.quantization.files import dequantized
from slime.weights.quantization.formats import Format


def carried_names(checkpoint: HfCheckpoint, family: Family) -> frozenset[str]:
    """Return the names of the tensors of ``checkpoint`` that models are built without, MTP layers included."""
    extra = extra_layers(read_config(checkpoint.path))
    return frozenset(name for name in checkpoint.names if family.carries_hf(name, extra))


def mtp_names(checkpoint: HfCheckpoint, family: Family) -> frozenset[str]:
    """Return the names of the tensors of ``checkpoint`` in MTP layers."""
    extra = extra_layers(read_config(checkpoint.path))
    return frozenset(name for name in checkpoint.names if family.is_mtp_hf(name, extra))


def extra_layers(config: dict[str, Any]) -> range:
    """Return the numbers of the layers that ``config.json`` has after the decoder's, for families whose MTP are."""
    config = config.get("text_config", config)
    layers = config.get("num_hidden_layers", 0)
    return range(layers, layers + (config.get("num_nextn_predict_layers") or 0))


def write_carried(
    source: Path, target: Path, family: Family, written: Iterable[str], form: Format | None = None
) -> tuple[dict[str, str], int]:
    """Copy what ``family`` carries of the checkpoint ``source`` to ``target``, but for the names in ``written``.

    ``form``: of its quantized weights, which are then written in bf16.
    """
    with HfCheckpoint(source) as checkpoint:
        names = carried_names(checkpoint, family) - set(written)
        if form is not None:
            scales = {w + s for w in written for s in form.suffixes}
            names -= scales
    return copy_tensors(source, target, names, form)


def copy_tensors(
    source: Path, target: Path, tensor_names: Collection[str], form: Format | None = None
) -> tuple[dict[str, str], int]:
    """Copy tensors of the checkpoint ``source`` to ``target``, one file per file: ``carried-00001.safetensors``...

    Return ``tensor name -> file``, and the bytes.
    """
    from safetensors.torch import save_file

    files: dict[str, str] = {}
    size = 0
    with HfCheckpoint(source) as checkpoint:
        names = sorted(tensor_names)
        for number, path in enumerate(sorted({checkpoint.file_of(name) for name in names}), 1):
            file = f"carried-{number:05d}.safetensors"
            own = [name for name in names if checkpoint.file_of(name) == path]
            copied = ((n, checkpoint.tensor(n)) for n in own) if form is None else dequantized(checkpoint, own, form)
            tensors = dict(copied)
            save_file(tensors, target / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(tensors, file))
            size += sum(tensor.nbytes for tensor in tensors.values())
    return files, size


def copies_of(source: Path, family: Family, written: Collection[str]) -> dict[str, str]:
    """Return the tensors of the checkpoint ``source`` that repeat one of those ``written``: name -> name of that."""
    copies = {}
    with HfCheckpoint(source) as checkpoint:
        for name in sorted(mtp_names(checkpoint, family)):
            original = family.copy_of(name)
            if original is not None:
                copies[name] = original if original in written else family.embedding  # of a tied output layer
    return copies


def write_copies(source: Path, target: Path, family: Family, written: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Write the tensors of ``source`` that repeat another one to ``target``, as that one is there now.

    ``written``: tensor name -> file in ``target``. Return ``tensor name -> file``, and the bytes.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    for name, original in copies_of(source, family, written).items():
        with safe_open(target / written[original], framework="pt") as file:
            tensors[name] = file.get_tensor(original)
    if not tensors:
        return {}, 0
    file_name = "copies-00001.safetensors"
    save_file(tensors, target / file_name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, file_name), sum(tensor.nbytes for tensor in tensors.values())
