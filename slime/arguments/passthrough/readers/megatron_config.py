"""Read the fields of megatron-core's configuration classes: ``python -P megatron_config.py OUT.json``."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import json
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any


def documentation(cls: type) -> dict[str, str]:
    """The string literal that follows each field in the source of ``cls`` and of its bases."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text and isinstance(text.value.value, str):
                found.setdefault(field.target.id, " ".join(text.value.value.split()))  # type: ignore[union-attr]
    return found


def describe(annotation: Any) -> dict[str, Any] | None:
    """How a value of ``annotation`` is written on a command line; None for what cannot be (functions, dtypes, ...)."""
    members = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
    names = {_name(m) for m in members}
    if len(members) == 1:
        return _describe_one(members[0])
    if names == {"int", "list[int]"}:
        return {"kind": "layout"}
    if names in ({"str", "list[str]"}, {"float", "list[float]"}):
        return {"kind": "str" if "str" in names else "float", "nargs": "+", "collapse": True}
    if {"str", "list[str]"} <= names:  # strings, or the enum members they name
        return {"kind": "str", "nargs": "+", "collapse": True}
    return {"kind": "str"} if "str" in names else None


def _name(annotation: Any) -> str:
    if typing.get_origin(annotation) is list:
        return f"list[{_name(typing.get_args(annotation)[0])}]"
    return getattr(annotation, "__name__", str(annotation))


def _describe_one(annotation: Any) -> dict[str, Any] | None:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (bool, int, float, str):
        return {"kind": annotation.__name__}
    if origin is typing.Literal:
        return {"kind": "str", "choices": list(args)}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"kind": "str", "choices": [m.name for m in annotation]}
    if origin is list and args and args[0] in (int, float, str):
        return {"kind": args[0].__name__, "nargs": "+"}
    if origin is tuple and set(args) <= {int, Ellipsis}:
        return {"kind": "layout"}
    return None


def main(out: str) -> None:
    """Write one record per field that can be a flag; the first class that has a field describes it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    classes = [TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig]
    found: dict[str, dict[str, Any]] = {}
    for cls in classes:
        documents, hints = documentation(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            described = describe(hints[field.name])
            if field.name in found:
                found[field.name]["classes"].append(cls.__name__)
                continue
            if described is None or field.name.startswith("_"):
                continue
            default = field.default
            if default is dataclasses.MISSING:
                default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            meta = field.metadata.get("argparse_meta", {})
            default = meta.get("default", default)
            found[field.name] = {
                "name": field.name,
                "default": default.name if isinstance(default, enum.Enum) else default,
                "options": meta.get("arg_names"),
                "help": documents.get(field.name, ""),
                "classes": [cls.__name__],
                **described,
            }
    Path(out).write_text(json.dumps(list(found.values())))


if __name__ == "__main__":
    main(sys.argv[1])
