"""Let the ranks of an engine, and those that push weights to it, meet at files and at one address.

SGLang meets at torch's TCP stores, which listen on every interface without authentication. Ranks of one host meet at
a private file instead: the engine's own at one in its temporary directory (``SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE``,
set by ``slime.backends.sglang_utils.environment``), those of a weight push at the one that the trainer names in
the place of its address. The store of an engine that spans hosts listens on its ``--dist-init-addr`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

NO_HOST = "tcp:///"
"""The form in which SGLang writes an address that is the path of a file."""


def meet_at_file(original: Callable[..., Any], *args: object, init_method: str, **kwargs: object) -> Any:
    """Around ``init_custom_process_group`` as the weight updater calls it."""
    if init_method.startswith(NO_HOST):
        path = init_method.removeprefix("tcp://").rpartition(":")[0]
        init_method = f"file://{path}"
    return original(*args, init_method=init_method, **kwargs)


def listen_on_one_address(original: Callable[..., Any], *args: object, **kwargs: Any) -> Any:
    """Around ``torch.distributed.init_process_group`` as the engine's own groups are made."""
    from torch.distributed import PrefixStore

    from slime.utils.distributed_utils import open_store

    method, rank, size = kwargs.get("init_method"), kwargs.get("rank", -1), kwargs.get("world_size", -1)
    if method is not None and method.startswith("tcp://") and rank == 0:
        timeout = kwargs.get("timeout") or timedelta(minutes=30)
        store, _, _ = open_store(method, rank, size, timeout)
        kwargs["store"] = PrefixStore("default_pg", store)  # torch does so for the ranks that it opens a store for
        del kwargs["init_method"]
    return original(*args, **kwargs)


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group",
        meet_at_file,
        HookType.AROUND,
    )
    HookRegistry.register("torch.distributed.init_process_group", listen_on_one_address, HookType.AROUND)
