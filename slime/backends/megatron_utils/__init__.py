"""The trainer on megatron-core.

Call :func:`import_megatron` before any ``import megatron``: on a machine without CUDA it first installs the adapter
that lets the unmodified package run there, and on every machine it applies the repairs the installed version needs.
Importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

import threading
import warnings

from slime.utils.moved import moved

# What megatron says on import about packages that are not installed, and about its own deprecated parts.
_NOISE = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "The following imports from `dynamic_context.py`",
    r"\s*The 'megatron.core.transformer.custom_layers",
    "full scope is deprecated",
    "When using async grad allreduce it is recommended",
    "`torch.distributed.*` is deprecated",
)
_lock = threading.RLock()
_done = False

__getattr__ = moved(
    __name__, {"set_default_megatron_args": "slime.backends.megatron_utils.arguments.set_default_megatron_args"}
)


def import_megatron() -> None:
    """Import ``megatron.core``, adapted to this machine. Cheap after the first call, safe from several threads.

    That is the installed one, also where a checkout of Megatron-LM comes first on the PYTHONPATH, unless
    ``SLIME_MEGATRON_CORE=checkout``. Raises RuntimeError when another one was imported before, or, on a machine without
    CUDA, any: the adapter comes first.
    """
    global _done
    with _lock:
        if _done:
            return
        from slime.backends.megatron_utils import cpu_adapter, installed_core, megatron_patches

        installed_core.prefer()
        for message in _NOISE:
            warnings.filterwarnings("ignore", message=message)
        adapted = cpu_adapter.install()
        megatron_patches.apply()
        if adapted:
            cpu_adapter.adapt_imported_megatron()
        _done = True
