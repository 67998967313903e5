"""The fields of megatron-core's configuration classes."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import textwrap
import types
import typing
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


def read() -> list[dict[str, Any]]:
    """One record per field; the first class that has it describes it. ``kind`` None: no command line can say it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    found: dict[str, dict[str, Any]] = {}
    for cls in (
        TransformerConfig,
        MLATransformerConfig,
        ModelParallelConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    ):
        documents, hints = documentation(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in found:
                found[field.name]["classes"].append(cls.__name__)
                continue
            described = describe(hints[field.name]) or {"kind": None}
            found[field.name] = {
                "name": field.name,
                "default": None if described["kind"] is None else _default(field),
                "options": field.metadata.get("argparse_meta", {}).get("arg_names"),
                "help": documents.get(field.name, ""),
                "classes": [cls.__name__],
                **described,
            }
    return list(found.values())


def _default(field: dataclasses.Field[Any]) -> Any:
    default = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = field.metadata.get("argparse_meta", {}).get("default", default)
    return default.name if isinstance(default, enum.Enum) else default
