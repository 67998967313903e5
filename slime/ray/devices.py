"""Which of the GPUs that a process sees is the one that Ray gave it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ray


def own_gpu_index() -> int:
    """Return the index, among the devices this process sees, of the GPU that Ray gave it; 0 without one.

    Ray does not hide devices from the processes of a run (``cluster.NOSET_VISIBLE_DEVICES``), but whoever started Ray
    may have: its ids are then the entries of ``CUDA_VISIBLE_DEVICES``, while torch and SGLang count what is visible.
    """
    return gpu_index(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_index(ids: Sequence[int | str], visible: str | None) -> int:
    """Return the index of ``ids[0]`` in the list ``visible`` (unset or empty: all devices); 0 without ids.

    Raises ValueError for an id that is not in the list.
    """
    if not ids:
        return 0
    entries = visible.split(",") if visible else []
    if not entries:
        return int(ids[0])
    if str(ids[0]) not in entries:
        raise ValueError(f"Ray gave this process GPU {ids[0]}, which CUDA_VISIBLE_DEVICES={visible} does not show it")
    return entries.index(str(ids[0]))
