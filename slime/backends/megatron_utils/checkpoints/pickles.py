"""Allowlist for what the pickles in a checkpoint may make when it is read: plain values, tensors and their storage.

A pickle can name any function, which whoever reads it then runs. torch reads ``.metadata`` and the values between the
tensors of a ``torch_dist`` checkpoint in that way, also where everything else is read with ``weights_only``.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.checkpoints import directory as checkpoint_dir
from slime.rollout.debug_data import numpy_globals

FLAG = "--unpickle-checkpoints"
_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_REFUSED_BY_TORCH = re.compile(r"eights only load failed.*?\bGLOBAL (\S+)", re.DOTALL)
_ALLOWED = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "collections": ("OrderedDict", "defaultdict"),
    "builtins": ("set", "frozenset", "complex", "slice", "bytearray", "range"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "_codecs": ("encode",),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("_load_from_bytes",),  # of the name is _load_storage here
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # megatron-core keeps the plans of all ranks in the metadata where the structure stays the same
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed._shard.metadata": ("ShardMetadata",),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata",),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
}  # fmt: skip


class UntrustedPickle(ValueError):
    """A file names something that is no plain value: reading it would run what it names."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()) and (module, name) not in _allowed_by_megatron():
            raise UntrustedPickle(f"{module}.{name}")
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        return super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    """Read what torch's own ``_load_from_bytes`` would read as a pickle that may run anything."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as e:  # of any kind: torch's own may read it, and run something
        refused = _REFUSED_BY_TORCH.search(str(e))
        raise UntrustedPickle("torch.storage._load_from_bytes" if refused is None else refused[1]) from e


@cache
def _allowed_by_megatron() -> frozenset[tuple[str, str]]:
    """The enums and dataclasses that megatron-core registers with torch as safe to read from checkpoints."""
    import_megatron()
    from megatron.core.safe_globals import SAFE_GLOBALS

    return frozenset((found.__module__, found.__qualname__) for found in SAFE_GLOBALS)


_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


def loads(data: bytes) -> Any:
    """``pickle.loads``, of plain values only unless the checkpoint is trusted. Raises UntrustedPickle."""
    return pickle.loads(data) if _trusts.get() else _Plain(io.BytesIO(data)).load()


def load_file(path: Path, *, mmap: bool) -> dict[str, Any]:
    """``torch.load`` of a state dict, of plain values and tensors only unless the checkpoint is trusted."""
    return dict(torch.load(path, map_location="cpu", mmap=mmap, weights_only=not _trusts.get()))


def check_metadata(directory: Path) -> None:
    """Raise UntrustedPickle when reading ``.metadata`` would run something; damage is left to its reader."""
    path = directory / ".metadata"
    if not path.is_file():
        return
    with path.open("rb") as file:
        try:
            _Plain(file).load()
        except UntrustedPickle as e:
            raise UntrustedPickle(_sentence(path, str(e))) from None
        except Exception:  # noqa: BLE001  (cut off: its next reader reports that, and runs nothing before)
            return


@contextlib.contextmanager
def plain_values_only(directory: Path, *, trusted: bool = False) -> Iterator[None]:
    """Let nothing of the checkpoint run in the block, unless it is ``trusted``. Raises UntrustedPickle."""
    if trusted:
        token = _trusts.set(True)
        try:
            yield
        finally:
            _trusts.reset(token)
        return
    check_metadata(directory)
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals([Namespace, *numpy_globals()]):
            yield
    except (Exception, CheckpointException) as e:
        refused = _REFUSED_BY_TORCH.search("".join(traceback.format_exception(e)))
        if refused is None and not isinstance(e, UntrustedPickle):
            raise
        raise UntrustedPickle(_sentence(directory, str(e) if refused is None else refused[1])) from e
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def reading_plain_values(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``load(args, root, state, *, step, ...)``: it runs no code of the checkpoint without ``FLAG``."""

    @wraps(load)
    def read(args: Args, root: str | Path, *others: object, step: int | None = None, **options: object) -> Any:
        directory, _ = checkpoint_dir.find_checkpoint(root, step)
        with plain_values_only(directory, trusted=args.unpickle_checkpoints):
            return load(args, root, *others, step=step, **options)

    return read


def _sentence(path: Path, what: str) -> str:
    return (
        f"{path} would run code when it is read: it holds {what}. Where you know who wrote it, {FLAG} reads it all the "
        "same; what is saved then holds plain values"
    )
