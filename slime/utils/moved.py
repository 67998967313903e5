"""Names at paths that older releases had: they still import, and say where they are now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module``, under which ``homes`` (name -> new dotted path) can still be imported.

    The new module is imported when a name is first asked for, with a DeprecationWarning that names the new path. Any
    other name raises AttributeError.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_moved(f"{module}.{name}", homes[name])
        home, _, attribute = homes[name].rpartition(".")
        return getattr(import_module(home), attribute)

    return __getattr__


def warn_moved(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn that ``old`` goes with the next major version and ``new`` stays. ``stacklevel`` as in ``warnings.warn``."""
    warnings.warn(
        f"{old} is the path of slime <= 0.3.1 and will go with the next major version; use {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
