"""The table of public names, and whether a callable can be called the way users call it."""

from __future__ import annotations

import csv
import importlib
import inspect
import warnings
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "data" / "public_surface.tsv"
NOT_GIVEN = inspect.Parameter.empty


@dataclass(frozen=True)
class Name:
    """A row. ``call``: parameters as users write them; ``...`` is a default that callers do not rely on, and names
    before ``/`` are passed by position only. ``note``: of an old name the new path, of a missing one the reason."""

    module: str
    name: str
    kind: str
    state: str
    call: str
    note: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def load(self) -> Any:
        """The object of a path within the module; raises ImportError or AttributeError."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(self.module)
            return reduce(getattr, self.name.split("."), module) if self.name else module

    def owner(self) -> Any:
        """The class that a method, property, field or attribute belongs to."""
        return Name(self.module, self.name.rpartition(".")[0], "class", self.state, "", "").load()

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def read_table() -> list[Name]:
    """All rows, in order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Name(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def signature_of(name: Name) -> inspect.Signature:
    """The signature as a caller sees it, without ``self``: of a class whose metaclass hides it, its ``__init__``."""
    target = name.load()
    if name.kind == "class" and type(target).__call__ is not type.__call__:
        target = target.__init__
        return _without_first(inspect.signature(target))
    signature = inspect.signature(target)
    if name.kind != "method":
        return signature
    static = inspect.getattr_static(name.owner(), name.leaf)
    return signature if isinstance(static, (staticmethod, classmethod)) else _without_first(signature)


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def parse_call(call: str) -> inspect.Signature:
    """``"args, x=1, *, key"`` as a signature; a lone ``/`` says that nothing is known about the parameters."""
    scope: dict[str, Any] = {}
    exec(f"def f({call}): ...", scope)
    return inspect.signature(scope["f"])


def problems(actual: inspect.Signature, call: inspect.Signature) -> list[str]:
    """Return the parts of ``call`` that the signature ``actual`` does not take, and the parameters missing from it."""
    found = []
    given = set()
    kinds = inspect.Parameter
    positional = [p for p in actual.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has = {p.kind for p in actual.parameters.values()}
    for place, wanted in enumerate(call.parameters.values()):
        if wanted.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            if wanted.kind not in has:
                found.append(f"takes no {'**' if wanted.kind is kinds.VAR_KEYWORD else '*'}{wanted.name}")
            continue
        match: inspect.Parameter | None
        if wanted.kind is kinds.KEYWORD_ONLY:
            match = actual.parameters.get(wanted.name)
            by_position = match is not None and match.kind is kinds.POSITIONAL_ONLY
            if by_position or (match is None and kinds.VAR_KEYWORD not in has):
                found.append(f"takes no keyword {wanted.name}")
        elif place < len(positional):
            match = positional[place]
            if wanted.kind is kinds.POSITIONAL_OR_KEYWORD and match.name != wanted.name:
                found.append(f"parameter {place} is {match.name}, not {wanted.name}")
        else:
            match = None
            if kinds.VAR_POSITIONAL not in has:
                found.append(f"takes no parameter {place} ({wanted.name})")
        if match is not None:
            given.add(match.name)
            if wanted.default is not NOT_GIVEN and match.default is NOT_GIVEN:
                found.append(f"{match.name} has no default")
            elif wanted.default not in (NOT_GIVEN, ...) and match.default != wanted.default:
                found.append(f"{match.name} defaults to {match.default!r}, not {wanted.default!r}")
    for parameter in actual.parameters.values():
        optional = parameter.default is not NOT_GIVEN or parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if parameter.name not in given and not optional:
            found.append(f"asks for {parameter.name} too")
    return found
