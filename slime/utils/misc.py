"""Small helpers that plugins import by name."""

from __future__ import annotations

import base64
import difflib
import functools
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from slime.utils.network import get_current_node_ip, get_free_port

__all__ = [
    "Box",
    "SingletonMeta",
    "chunk_named_params_by_size",
    "decode_int32_meta_array",
    "exec_command",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "should_run_periodic_action",
]

T = TypeVar("T")


@functools.cache
def load_function(path: str, flag: str | None = None) -> Any:
    """Import ``package.module.attr`` and return the attribute; the result is cached for the life of the process.

    ``flag`` is the command-line flag the path came from, for the message. Raises ValueError for a path without a dot,
    ImportError when the module cannot be imported or fails while it is, AttributeError when it has no such attribute;
    the last two name the nearest there is.
    """
    origin = f"{flag} {path!r}" if flag else f"dotted path {path!r}"
    if not isinstance(path, str) or "." not in path or ":" in path or "/" in path:
        raise ValueError(f"{origin} must be a dotted path like package.module.function")
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_path}.".startswith(f"{e.name}."):  # one that the module itself imports
            raise ImportError(f"{origin}: module {module_path!r} cannot be imported: {e}") from e
        raise ImportError(f"{origin}: there is no module {e.name!r}{_hint_at_module(e.name)}") from e
    except Exception as e:
        raise ImportError(f"{origin}: importing module {module_path!r} raised {type(e).__name__}: {e}") from e
    try:
        return getattr(module, name)
    except AttributeError as e:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {module_path}.{near[0]}?" if near else ""
        where = getattr(module, "__file__", None) or "a namespace package"
        raise AttributeError(f"{origin}: module {module_path!r} ({where}) has no attribute {name!r}{hint}") from e


def _hint_at_module(missing: str) -> str:
    """Return what may have been meant by the module ``missing``, whose parent package exists."""
    parent_path, _, name = missing.rpartition(".")
    parent = sys.modules.get(parent_path)
    if inspect.isclass(getattr(parent, name, None)):
        return f"; {missing} is a class, whose methods have no path: name a function of the module"
    if parent is not None and not hasattr(parent, "__path__"):
        return f"; {parent_path} is a module, not a package"
    siblings = {module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", None))}
    near = difflib.get_close_matches(name, siblings, n=1)
    hint = f"; did you mean {f'{parent_path}.' if parent_path else ''}{near[0]}?" if near else ""
    return hint if parent_path else f"{hint or '.'} Is its folder on PYTHONPATH of this process?"


class SingletonMeta(type):
    """Metaclass of classes that have one instance per process.

    One that has a method ``serves``, which is given the arguments of each call, is made again when that returns False.
    """

    _instances: dict[type, Any] = {}  # noqa: RUF012  (shared by all singletons on purpose)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        found = SingletonMeta._instances.get(cls)
        if found is None or (hasattr(cls, "serves") and not found.serves(*args, **kwargs)):
            found = SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return found

    def clear_instances(cls: type | None = None) -> None:
        """Forget the instance of ``cls``, so that the next call builds a new one; without ``cls`` those of all classes.

        Also as ``SomeClass.clear_instances()``.
        """
        if cls is None:
            SingletonMeta._instances.clear()
        else:
            SingletonMeta._instances.pop(cls, None)


class Box:
    """Wraps a value so that Ray passes a reference to it on, instead of the value."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


def group_by(iterable: Iterable[T], key: Callable[[T], Hashable] | None = None) -> dict[Any, list[T]]:
    """Return ``{key(item): [items in order]}``, keys in first-seen order; ``key`` defaults to the item itself."""
    groups: dict[Any, list[T]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a bash command line; return its stdout when captured. Raises RuntimeError with its output on failure."""
    print(f"EXEC: {cmd}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd], check=False, text=True, stdout=subprocess.PIPE if capture_output else None
    )
    if done.returncode != 0:
        raise RuntimeError(f"command exited with {done.returncode}: {cmd}\n{done.stdout or ''}")
    return done.stdout if capture_output else None


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """True after every ``interval`` rollouts, at epoch ends and, when ``num_rollout`` is given, after the last rollout.

    Never true when ``interval`` is None.
    """
    if interval is None:
        return False
    step = rollout_id + 1
    at_epoch_end = bool(num_rollout_per_epoch) and step % num_rollout_per_epoch == 0  # type: ignore[operator]
    return step % interval == 0 or at_epoch_end or (num_rollout is not None and step == num_rollout)


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, Any]], chunk_size: int
) -> Iterator[list[tuple[str, Any]]]:
    """Yield consecutive ``(name, tensor)`` lists of at most ``chunk_size`` bytes (a larger tensor comes alone)."""
    chunk: list[tuple[str, Any]] = []
    held = 0
    for name, tensor in named_params:
        size = tensor.numel() * tensor.element_size()
        if chunk and held + size > chunk_size:
            yield chunk
            chunk, held = [], 0
        chunk.append((name, tensor))
        held += size
    if chunk:
        yield chunk


def decode_int32_meta_array(value: Any, keys: Sequence[str] | str | None = None) -> Any:
    """Return ``value`` as a flat int32 numpy array.

    With ``keys`` it is the mapping of an engine's answer, of which the first of them that is there is meant; None
    without any.

    ``value`` is base64 text, raw little-endian bytes, or any (nested) list, array or tensor of integers. Raises
    ValueError when it is none of these or its bytes are not a multiple of four.
    """
    if keys is not None:
        value = first_present(value, *([keys] if isinstance(keys, str) else keys))
        if value is None:
            return None
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except ValueError as e:
            raise ValueError(f"expected base64 text of int32 values, got {value[:40]!r}: {e}") from e
    if isinstance(value, (bytes, bytearray, memoryview)):
        if len(value) % 4:
            raise ValueError(f"{len(value)} bytes are not a whole number of int32 values")
        return np.frombuffer(bytes(value), dtype="<i4").astype(np.int32, copy=True)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"expected integers, got an array of {array.dtype}")
    return array.astype(np.int32).reshape(-1)


def first_present(mapping: Mapping[str, Any], *names: str) -> Any:
    """Return the first value among ``names`` that is in ``mapping`` and not None; else None."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def to_int32_tensor(values: object) -> Any:
    """Return a torch int32 tensor; torch is imported only here, so that types stay importable without it."""
    import torch

    return torch.from_numpy(np.array(values, dtype=np.int32))
