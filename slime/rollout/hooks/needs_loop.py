"""Plain functions that can only be called where an event loop runs, because they return a task or a future."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

_MAKES_TASKS = frozenset(
    {"create_task", "create_future", "ensure_future", "gather", "shield", "wrap_future", "run_in_executor"}
)
_HAS_A_LOOP_OF_ITS_OWN = frozenset({"new_event_loop", "run_until_complete", "run_coroutine_threadsafe"})
_AWAITABLE = re.compile(r"\b(Awaitable|Coroutine|Future|Task)\b")


def needs_loop(function: Callable[..., Any]) -> bool:
    """True when a plain ``function`` is seen to make tasks or futures of the running loop.

    Its return annotation is an awaitable, or it names ``asyncio.gather``, ``create_task`` and the like: itself, or in
    a function of its module, or one that it decorates. A coroutine alone needs no loop before it is awaited. Whether
    the function is called tells too late: the call may have done something before it fails, so it cannot be repeated.
    """
    plain = _plain(function)
    if plain is None:
        return False
    returns = plain.__annotations__.get("return", "")
    return bool(_AWAITABLE.search(str(returns))) or any(map(_makes_tasks, _reached(plain, set())))


def _plain(function: Any) -> FunctionType | None:
    """The Python function that a call runs first; None for coroutine functions, classes and built-ins."""
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function) and not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    return function if inspect.isfunction(function) and not inspect.iscoroutinefunction(function) else None


def _reached(function: FunctionType, seen: set[FunctionType]) -> Iterator[FunctionType]:
    """``function``, and the plain functions that it closes over, or names in its own module."""
    if function in seen:
        return
    seen.add(function)
    yield function
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    of_its_module = [value for value in named if getattr(value, "__module__", None) == function.__module__]
    for used in of_its_module + _closed_over(function):
        inner = _plain(used) if inspect.isroutine(used) or isinstance(used, functools.partial) else None
        if inner is not None:
            yield from _reached(inner, seen)


def _closed_over(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    return found


def _makes_tasks(function: FunctionType) -> bool:
    names = set(function.__code__.co_names)
    if names & _HAS_A_LOOP_OF_ITS_OWN:
        return False
    values = [function.__globals__.get(name) for name in names]
    if asyncio in values or "asyncio" in names:
        return bool(names & _MAKES_TASKS)
    return any(value is not None and value is getattr(asyncio, name, None) for value in values for name in _MAKES_TASKS)
