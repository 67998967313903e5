"""Names of older releases: paths that still import and say where their home is, parameters with either name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Container, Mapping
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def moved(module: str, homes: Mapping[str, str], *, for_good: Container[str] = ()) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module``, under which ``homes`` (name -> path of its home) can be imported.

    The home is imported when a name is first asked for, with a DeprecationWarning that names it unless the name stays
    ``for_good``. Any other name raises AttributeError.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            known = "" if name.startswith("__") else f"; it has {', '.join(sorted(homes))}"
            raise AttributeError(f"module {module!r} has no attribute {name!r}{known}")
        if name not in for_good:
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


def also_named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function whose callers give parameters other ``names`` (other name -> own name) by keyword.

    Which name slime had differs between releases <= 0.3.1 or between their functions. Calls that use both names raise
    TypeError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            own = {names.get(name, name): value for name, value in kwargs.items()}
            if len(own) < len(kwargs):
                raise TypeError(f"{function.__name__}() got one parameter under two names: {', '.join(kwargs)}")
            return function(*args, **own)  # type: ignore[arg-type]

        return call

    return decorate
