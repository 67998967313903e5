"""Cases of which the quick suite runs a few, and the soak suite all others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return ``cases`` as the parameters of a test; those that are not in ``kept`` are soak tests.

    A case is the value of one parameter, or a tuple of values.
    """
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=() if case in kept else pytest.mark.soak))
    return params


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values of the parameters ``names`` in those tests of the module that this session runs, each once.

    A fixture of a module measures these alone, so that a few cases, or one that ``-k`` names, cost what they take.
    Tuples of values for several names.
    """
    found = []
    for item in request.session.items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and all(name in params for name in names):
            values = tuple(params[name] for name in names)
            found.append(values if len(names) > 1 else values[0])
    return list(dict.fromkeys(found))
