"""Steps of every writer of a Hugging Face checkpoint besides writing tensors: index, other files, publication."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.utils import digests
from slime.utils.atomic_file import write_atomically
from slime.weights.hf.checkpoint import INDEX

MAX_SHARD_BYTES = 5 * 2**30
MADE_OF = ".made_of.json"
"""In a directory that is being written: what it is made of, so that only the same work is continued in it."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")


def shard_name(number: int, total: int) -> str:
    """Return the file name of shard ``number`` (from 1) of ``total``."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def check_output(out: Path, *, force: bool, sources: Mapping[str, Path | None]) -> None:
    """Raise unless ``out`` may be written: not there, or a directory to replace with none of ``sources`` inside."""
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists already: choose another directory, or -f to replace it")
    if out.exists() and not out.is_dir():
        raise ValueError(f"cannot write to {out}: it is a file")
    if out.is_symlink():  # of which only the link is replaced
        return
    for what, source in sources.items():
        if source is not None and source.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"refusing to write to {out}: replacing it would remove {what} {source}")


def partial_of(out: Path) -> Path:
    """Return the directory beside ``out`` that a checkpoint is written to until it is complete."""
    return out.with_name(f".{out.name}.partial")


def begin(out: Path, made_of: Mapping[str, Any] | None = None) -> Path:
    """Make ``partial_of(out)``, empty, and return it; one of the same work, ``made_of``, that ended keeps its files."""
    partial = partial_of(out)
    note, words = partial / MADE_OF, json.dumps(made_of)
    if made_of is not None and note.is_file() and note.read_text() == words:
        return partial
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    if made_of is not None:
        write_atomically(note, words.encode(), durable=True)
    return partial


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``path`` and read it back; it appears when it is on the disk and every bit of it is right."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    unfinished = path.with_name(f"{path.name}.unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    with safe_open(unfinished, framework="pt") as opened:
        for name, tensor in tensors.items():
            written = opened.get_tensor(name)
            if written.dtype != tensor.dtype or written.shape != tensor.shape or not _same_bits(written, tensor):
                raise OSError(f"{unfinished}: {name} is not what was written; is the disk damaged?")
    unfinished.rename(path)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def publish(partial: Path, out: Path) -> None:
    """Rename the complete directory ``partial`` to ``out``, in the place of an older one."""
    (partial / MADE_OF).unlink(missing_ok=True)
    old = out.with_name(f".{out.name}.old")
    _remove(old)
    if out.exists() or out.is_symlink():
        out.rename(old)
    partial.rename(out)
    _remove(old)


def _remove(directory: Path) -> None:
    if directory.is_symlink():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index: ``weight_map`` is tensor name -> file, ``total_size`` the bytes of all tensors."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer and the like: top-level files that are neither weights nor an index of weights."""
    for path in sorted(source.iterdir()):
        of_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith((".index.json", digests.FILE))
        if path.is_file() and not of_weights:
            shutil.copyfile(path, target / path.name)


def remove_quantization(directory: Path) -> None:
    """Remove ``quantization_config`` from ``config.json``."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    removed = [part.pop("quantization_config", None) for part in parts]
    if any(removed):
        path.write_text(json.dumps(config, indent=2) + "\n")


def write_dtype(directory: Path, written: Iterable[tuple[torch.Size | tuple[int, ...], torch.dtype]]) -> None:
    """Let ``config.json`` name the dtype that most numbers of ``written`` (shape, dtype) have, which may be new.

    The biases of experts are fp32 under weights of any dtype.
    """
    numbers: Counter[torch.dtype] = Counter()
    for shape, dtype in written:
        numbers[dtype] += torch.Size(shape).numel()
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if numbers:
        name = str(numbers.most_common(1)[0][0]).removeprefix("torch.")
        if config.get(key) != name:
            path.write_text(json.dumps({**config, key: name}, indent=2) + "\n")
