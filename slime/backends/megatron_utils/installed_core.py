"""Let ``import megatron.core`` find the installed package where a checkout of Megatron-LM comes first on ``sys.path``.

The other packages of the checkout (``megatron.training``, ...) can still be imported; they get the installed core too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from pathlib import Path

from slime.arguments.passthrough.source import CHECKOUT, CORE_VARIABLE, MEGATRON, installed_directory, unused_core

logger = logging.getLogger(__name__)


def prefer() -> None:
    """Settle where megatron.core comes from in this process. Raises RuntimeError when another one is loaded."""
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
    else:  # a package without code, as that of megatron-core is, and whatever the checkout's would do
        bare = importlib.machinery.ModuleSpec("megatron", None, is_package=True)
        bare.submodule_search_locations = places
        sys.modules["megatron"] = importlib.util.module_from_spec(bare)
    logger.info("megatron.core is the installed one in %s, not that in %s", installed, unused)
