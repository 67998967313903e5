"""Give a process twice the precision: whatever names float32 in torch, megatron-core and slime means float64.

Layouts that compute the same thing differ in fp32 by rounding alone, which hides small errors; in float64 they differ
by 1e-15. Neither Megatron nor slime has such a mode, so here the *name* float32 changes its meaning, before either is
imported. Weights must come from a checkpoint in float64 (see ``as_float64``): files are read by their own dtype.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def enable() -> None:
    """Redefine float32 in this process. Call before anything of megatron-core is imported; there is no way back.

    Raises RuntimeError when megatron-core is imported already: start the rank with ``fresh=True``.
    """
    if torch.float32 is torch.float64:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported: start the rank with run_distributed(..., fresh=True)")
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    _replace(torch.Tensor, "type", _type_name)
    _replace(torch, "from_numpy", lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _replace(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _type_name(result: Any) -> Any:
    """Megatron's optimizers sort parameters by the names of their types."""
    return "torch.FloatTensor" if isinstance(result, str) and result == "torch.DoubleTensor" else result


def as_float64(checkpoint: str | Path, out: str | Path) -> str:
    """Copy a tiny checkpoint to ``out`` with its weights in float64; return the path. Not after ``enable``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    for path in Path(out).glob("*.safetensors"):
        save_file({n: t.double() for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    return str(out)
