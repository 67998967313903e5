"""Check that the installed SGLang has what a module of this plug-in builds on."""

from __future__ import annotations

import inspect
import pkgutil


class OtherSGLangError(Exception):
    """SGLang differs from the version that a module was written for: it must not be hooked."""


def require(target: str, parameters: str) -> None:
    """Raise OtherSGLangError unless the function (or dataclass) ``target`` takes these parameters, in this order.

    Of a dataclass the fields are meant, in any order and among others.
    """
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as e:
        raise OtherSGLangError(f"{target} is missing") from e
    names = list(inspect.signature(found).parameters)
    expected = parameters.split()
    if not set(expected) <= set(names) if inspect.isclass(found) else names != expected:
        raise OtherSGLangError(f"{target} takes ({', '.join(names)})")
