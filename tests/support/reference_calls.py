"""Rows of a table of calls as code written for slime <= 0.3.1 makes them, and how a row is called and judged."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.public_surface import Name, parse_call

POSITIONAL, KEYWORD = "by position", "by keyword"
KINDS = inspect.Parameter


@dataclass(frozen=True)
class Call:
    """``path`` is called with ``given``: arguments by the reference's names, in its order (or a function that makes
    them, where they are changed or costly). ``on`` makes the object of a method. ``expected`` is the result, or a
    function that is given the result (and the object and the arguments, as far as it takes them) and asserts."""

    path: str
    given: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    expected: Any
    on: Callable[[], Any] | None = None
    also: Mapping[str, str] | None = None
    """Other names of parameters that the reference's releases use: table's name -> the name in this call."""

    def arguments(self) -> dict[str, Any]:
        return dict(self.given() if callable(self.given) else self.given)


def split(call: inspect.Signature, given: dict[str, Any], form: str) -> tuple[list[Any], dict[str, Any]]:
    """Return ``given`` as (args, kwargs); in the positional form all go by position that can."""
    args: list[Any] = []
    kwargs = dict(given)
    if KINDS.VAR_POSITIONAL in {parameter.kind for parameter in call.parameters.values()}:
        form = POSITIONAL  # what stands before *args has no other
    for parameter in call.parameters.values():
        if parameter.kind is KINDS.VAR_POSITIONAL:
            args += kwargs.pop(f"*{parameter.name}", [])
        by_position = parameter.kind is KINDS.POSITIONAL_ONLY or (
            form is POSITIONAL and parameter.kind is KINDS.POSITIONAL_OR_KEYWORD
        )
        if not by_position:
            continue
        if parameter.name not in kwargs:
            break  # what follows can only go by keyword
        args.append(kwargs.pop(parameter.name))
    return args, kwargs


def perform(row: Name, call: Call, form: str) -> None:
    """Call ``row`` in ``form`` and judge the result."""
    given = call.arguments()
    args, kwargs = split(parse_call(row.call), given, form)
    kwargs = {(call.also or {}).get(name, name): value for name, value in kwargs.items()}
    owner = call.on() if call.on else None
    target = getattr(owner, row.leaf) if call.on else row.load()
    result = target(*args, **kwargs)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if callable(call.expected) and not inspect.isclass(call.expected):
        inputs = (result, owner, given)
        call.expected(*inputs[: len(inspect.signature(call.expected).parameters)])
    else:
        check_equal(result, call.expected)


def check_equal(result: Any, expected: Any) -> None:
    """Equality that lets floating-point numbers, in containers and tensors too, differ by rounding."""
    if torch.is_tensor(result):
        wanted = expected if torch.is_tensor(expected) else torch.tensor(expected)
        torch.testing.assert_close(result.detach(), wanted, check_dtype=False, rtol=1e-5, atol=1e-6)
    elif isinstance(expected, dict):
        assert set(result) == set(expected)
        for key, value in expected.items():
            check_equal(result[key], value)
    elif isinstance(expected, (list, tuple)) and not isinstance(result, str):
        assert len(result) == len(expected), result
        for one, other in zip(result, expected, strict=True):
            check_equal(one, other)
    elif isinstance(expected, float):
        assert result == pytest.approx(expected)
    else:
        assert result == expected


def is_true(result: Any) -> None:
    assert result is True


def forms(row: Name) -> list[str]:
    """The forms in which users can call ``row``: one where no parameter can go by position and by keyword."""
    kinds = [parameter.kind for parameter in parse_call(row.call).parameters.values()]
    if KINDS.POSITIONAL_OR_KEYWORD not in kinds or KINDS.VAR_POSITIONAL in kinds:
        return [KEYWORD]
    return [POSITIONAL, KEYWORD]


def named(call: inspect.Signature) -> set[str]:
    """The parameters that a table has to give, all optional ones included."""
    return {p.name for p in call.parameters.values() if p.kind not in (KINDS.VAR_KEYWORD, KINDS.VAR_POSITIONAL)}


__all__ = ["KEYWORD", "POSITIONAL", "Call", "check_equal", "forms", "is_true", "named", "perform"]
