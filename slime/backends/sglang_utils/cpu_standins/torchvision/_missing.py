"""Functions of the stand-in: every one raises."""

from __future__ import annotations

from typing import Callable, NoReturn


def missing(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises and names ``name``."""

    def raise_missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} is not available in CPU engines: images go through PIL (--sglang-image-processor-backend pil), and "
            "videos need a machine with CUDA."
        )

    raise_missing.__name__ = name.rpartition(".")[2]
    return raise_missing


def module_getattr(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """Return a module-level ``__getattr__`` for which every public name is a missing function."""

    def getattr_(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{module}.{name}")

    return getattr_
