"""Ranks of ``test_checkpoint_digests``."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.backends.megatron_utils.checkpoints.digests import write_digests


def write_where_nothing_is_listed(folder: str) -> str:
    """Write digests where the first rank cannot list the files; return what that says."""
    dist.init_process_group("gloo")

    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    if dist.get_rank() == 0:
        Path.rglob = stale  # type: ignore[method-assign]
    try:
        write_digests(Path(folder))
    except RuntimeError as e:
        return str(e)
    return "written"
