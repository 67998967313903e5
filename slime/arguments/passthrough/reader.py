"""Write the arguments of an installed package as JSON records: ``python -P reader.py READER OUT.json``.

Runs in a helper process, by path: it imports the package, which takes seconds, and nothing here is importable by it.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]


def sglang_server_args() -> argparse.ArgumentParser:
    """The parser of ``ServerArgs.add_cli_args``."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def router_args() -> argparse.ArgumentParser:
    """The parser of ``RouterArgs.add_cli_args``: prefixed, without host and port."""
    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    return parser


class _Found(BaseException):
    """Carries the parser out of ``parse_args``; no ``except Exception`` on the way stops it."""


def megatron_training() -> argparse.ArgumentParser:
    """The parser of a Megatron-LM checkout with every group of its training scripts, before any word is parsed."""
    from megatron.training import arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if hasattr(arguments, "add_megatron_arguments"):
        return arguments.add_megatron_arguments(parser) or parser

    def take(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        raise _Found(parser)

    try:  # a release that builds the parser inside parse_args hands it to the provider of extra arguments
        arguments.parse_args(extra_args_provider=take)
    except _Found as found:
        return found.args[0]
    raise RuntimeError("megatron.training.arguments.parse_args did not call extra_args_provider")


def megatron_config() -> Records:
    """One record per field of megatron-core's configuration classes; the first class that has it describes it.

    ``kind`` None: no command line can say it.
    """
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
        documents, hints = _documentation(cls), typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in found:
                found[field.name]["classes"].append(cls.__name__)
                continue
            described = _describe(hints[field.name]) or {"kind": None}
            found[field.name] = {
                "name": field.name,
                "default": None if described["kind"] is None else _default(field),
                "options": field.metadata.get("argparse_meta", {}).get("arg_names"),
                "help": documents.get(field.name, ""),
                "classes": [cls.__name__],
                **described,
            }
    return list(found.values())


def _documentation(cls: type) -> dict[str, str]:
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


def _describe(annotation: object) -> dict[str, Any] | None:
    """Return how a value of ``annotation`` is written on a command line; None if it cannot be (functions, dtypes)."""
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


def _name(annotation: object) -> str:
    if typing.get_origin(annotation) is list:
        return f"list[{_name(typing.get_args(annotation)[0])}]"
    return getattr(annotation, "__name__", str(annotation))


def _describe_one(annotation: object) -> dict[str, Any] | None:
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


def _default(field: dataclasses.Field[Any]) -> Any:
    default = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = field.metadata.get("argparse_meta", {}).get("default", default)
    return default.name if isinstance(default, enum.Enum) else default


KINDS = {
    "str": "str",
    "int": "int",
    "float": "float",
    "loads": "json",
    "json_list_type": "json",
    "human_readable_int": "human_int",
    "nullable_str": "nullable_str",
}


def records(parser: argparse.ArgumentParser) -> Records:
    """One record per action: options, dest, default, kind, action, nargs, const, choices, help, title of its group."""
    titles = {id(a): g.title or "" for g in parser._action_groups for a in g._group_actions}
    actions = [a for a in parser._actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
    return [_record(a, titles.get(id(a), "")) for a in actions]


def _record(action: argparse.Action, title: str) -> dict[str, Any]:
    form = _form(action)
    help_text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
    return {
        "options": list(action.option_strings),
        "dest": action.dest,
        "default": _plain(action.default),
        "kind": _kind(action),
        "action": form,
        "nargs": None if form in ("true", "false", "tristate") else action.nargs,
        "const": _plain(action.const) if action.nargs == "?" else None,
        # Some choices come from sets, whose order differs from process to process.
        "choices": None if action.choices is None else sorted(map(_plain, action.choices), key=str),
        "help": " ".join(help_text.replace("%(default)s", str(action.default)).replace("%%", "%").split()),
        "title": "" if title in ("options", "optional arguments") else title,
        "class": type(action).__name__,
    }


def _form(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "tristate"
    if action.nargs == 0:
        return "false" if getattr(action, "const", True) is False else "true"
    return "append" if isinstance(action, argparse._AppendAction) else "value"


def _kind(action: argparse.Action) -> str:
    name = getattr(action.type, "__name__", "str")
    if name in KINDS:
        return KINDS[name]
    if any(isinstance(choice, enum.Enum) for choice in action.choices or ()):
        return "str"
    return _kind_of_converter(action.type) if callable(action.type) else "str"


def _kind_of_converter(convert: Callable[[str], Any]) -> str:
    """Return the kind of values that a package's converter makes of numbers and lists; text when it makes neither."""

    def result(text: str) -> Any:
        try:
            return convert(text)
        except Exception:  # noqa: BLE001  (a converter may refuse in any way)
            return None

    number, pattern = result("3"), result("([1]*2+[0])")
    if pattern in ([1, 1, 0], (1, 1, 0)) or result("1,0") in ([1, 0], (1, 0)):
        return "layout"
    if type(number) is int:
        return "int"
    return "float" if type(number) is float else "str"


def _plain(value: object) -> Any:
    """``value`` as JSON has it: members of enumerations by name, what JSON cannot say as None."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else None


READERS: dict[str, Callable[[], argparse.ArgumentParser | Records]] = {
    read.__name__: read for read in (megatron_config, megatron_training, router_args, sglang_server_args)
}

if __name__ == "__main__":
    found = READERS[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(records(found) if isinstance(found, argparse.ArgumentParser) else found))
