"""The trainer on megatron-core.

Call :func:`import_megatron` before any ``import megatron``: on a machine without CUDA it first installs the adapter
that lets the unmodified package run there, and on every machine it applies the repairs the installed version needs.
Importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
import warnings
from pathlib import Path

from slime.utils.moved import moved

logger = logging.getLogger(__name__)

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
        from slime.backends.megatron_utils.patches import cpu_adapter, megatron_patches

        prefer_installed_core()
        for message in _NOISE:
            warnings.filterwarnings("ignore", message=message)
        adapted = cpu_adapter.install()
        megatron_patches.apply()
        if adapted:
            cpu_adapter.adapt_imported_megatron()
        _done = True


def prefer_installed_core() -> None:
    """Let ``import megatron.core`` find the installed package where a checkout of Megatron-LM comes first on
    ``sys.path``. Raises RuntimeError when another one is loaded.

    The other packages of the checkout (``megatron.training``, ...) can still be imported; they get the installed core
    too.
    """
    from slime.arguments.passthrough.source import (
        CHECKOUT,
        CORE_VARIABLE,
        MEGATRON,
        installed_directory,
        unused_core,
    )

    unused, installed = unused_core(), installed_directory(MEGATRON)
    if unused is None or installed is None:
        return
    loaded = getattr(sys.modules.get("megatron.core"), "__file__", None)
    if loaded is not None and Path(loaded).parent.samefile(unused):
        raise RuntimeError(
            f"megatron.core was imported from {unused} before slime could choose the installed one, {installed}. "
            f"Import it after slime.backends.megatron_utils.import_megatron(), or set {CORE_VARIABLE}={CHECKOUT} to "
            "use that copy."
        )
    spec = importlib.util.find_spec("megatron")
    others = [] if spec is None else list(spec.submodule_search_locations or ())
    first = str(installed.parent)
    places = [first, *(place for place in others if place != first)]
    if "megatron" in sys.modules:
        sys.modules["megatron"].__path__ = places
    else:  # a package without code, as that of megatron-core is, and for all that the checkout's would do
        bare = importlib.machinery.ModuleSpec("megatron", None, is_package=True)
        bare.submodule_search_locations = places
        sys.modules["megatron"] = importlib.util.module_from_spec(bare)
    logger.info("megatron.core is the installed one in %s, not that in %s", installed, unused)
