"""Give the engine's shared memory a name that slime can find when the engine has been killed.

SGLang keeps its load counters in a file of ``/dev/shm`` with a random name, and never removes it.
"""

from __future__ import annotations

import os

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def with_name_of_scratch(path: str, *args: object, **kwargs: object) -> str:
    """After ``shm_path_for``: put the name of the engine's own temporary directory first, if it has one."""
    directory, name = os.path.split(path)
    scratch = os.environ.get("TMPDIR")  # read here: hooks may have been registered before the engine was forked
    return os.path.join(directory, f"{os.path.basename(scratch)}-{name}") if scratch else path


def register() -> None:
    """Register the hook."""
    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", with_name_of_scratch, HookType.AFTER)
