"""Ranks of ``test_distributed_utils``."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.distributed_utils import share_gloo_device


def sums_over_groups(count: int) -> dict[str, Any]:
    """Sum over ``count`` groups at once; return the sums, the groups' timeouts, and how many threads poll."""
    share_gloo_device()
    share_gloo_device()  # a second trainer in the process
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    groups = [dist.new_group(timeout=timedelta(seconds=50 + i)) for i in range(count)]
    tensors = [torch.full((1000,), float(10 * i + dist.get_rank())) for i in range(count)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
    for work in works:
        work.wait()
    alone = dist.new_group([1])
    if dist.get_rank() == 1:
        dist.barrier(alone)
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{os.getpid()}/task").iterdir()]
    return {
        "sums": [t.unique().tolist() for t in tensors],
        "timeouts": [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups],
        "polling": names.count("gloo_tcp_loop"),
    }
