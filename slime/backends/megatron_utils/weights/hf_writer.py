"""What every writer of a Hugging Face checkpoint does besides writing tensors: index, other files, publication."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.utils.hf_checkpoint import INDEX

MAX_SHARD_BYTES = 5 * 2**30
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")


def shard_name(number: int, total: int) -> str:
    """Return the file name of shard ``number`` (from 1) of ``total``."""
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def partial_of(out: Path) -> Path:
    """Return the directory beside ``out`` that a checkpoint is written to until it is complete."""
    return out.with_name(f".{out.name}.partial")


def begin(out: Path) -> Path:
    """Make ``partial_of(out)``, empty, and return it."""
    partial = partial_of(out)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def publish(partial: Path, out: Path) -> None:
    """Rename the complete directory ``partial`` to ``out``, in the place of an older one."""
    old = out.with_name(f".{out.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    if old.exists():
        shutil.rmtree(old)


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write the index: ``weight_map`` is tensor name -> file, ``total_size`` the bytes of all tensors."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer and the like: top-level files that are neither weights nor an index of weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def write_dtype(directory: Path, written: Iterable[tuple[torch.Size | tuple[int, ...], torch.dtype]]) -> None:
    """Let ``config.json`` name the dtype that most numbers of ``written`` (shape, dtype) have, which may be new.

    The biases of experts are fp32 whatever the weights are.
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
