"""Ranks of ``test_rendezvous``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN


def sum_over_hosts() -> dict[str, Any]:
    """Meet as the ranks of an engine over two hosts do, the first at a store of the hook's; return what they sum."""
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = registry.HookType = SimpleNamespace()  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        sys.modules[name] = ModuleType(name)
    sys.modules[registry.__name__] = registry
    sys.path.insert(0, str(ENGINE_PLUGIN))
    from slime_engine_plugin.server.rendezvous import listen_on_one_address

    stores = []

    def original(*args: Any, **kwargs: Any) -> Any:
        stores.append(kwargs.get("store"))
        return dist.init_process_group(*args, **kwargs)

    rank = int(os.environ["RANK"])
    listen_on_one_address(
        original,
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        world_size=2,
        rank=rank,
        timeout=timedelta(seconds=15),
    )
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return {"sum": tensor.item(), "own store": stores[0] is not None}
