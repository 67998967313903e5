"""Write the package ``slime/arguments/args`` from the declarations of flags: ``python -m tools.gen_args [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from slime.arguments.command_line import all_flags
from slime.arguments.derived import RESOLVED
from slime.arguments.flag import Flag, Kind
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.passthrough import megatron

FOLDER = Path(__file__).parents[1] / "slime" / "arguments" / "args"
WIDTH = 120
OPENING = '''"""{about}

Written by `python -m tools.gen_args` from {source}; change it there.
"""

from __future__ import annotations
'''
CLASSES = {
    "slime": ("own", "OwnArgs", "slime's own flags", "slime/arguments/groups"),
    "megatron": ("megatron", "MegatronArgs", "Megatron's flags", "slime/arguments/passthrough"),
    "sglang": ("sglang", "SGLangArgs", "The flags of SGLang's server", "slime/arguments/passthrough"),
    "router": ("router", "RouterArgs", "The flags of the router", "slime/arguments/passthrough"),
}
"""Source of flags -> its module and class, a title, where the flags are declared."""
FIELDS = "fields of its configuration classes that have other names than their flags"
PACKAGE = '''"""``Args``, the type of the namespace that ``parse_args`` returns.

It is for type checkers: a namespace stays an ``argparse.Namespace``, and ``Args`` is that class at run time.

Written by `python -m tools.gen_args`; change it there.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.arguments.args.megatron import MegatronArgs
    from slime.arguments.args.own import OwnArgs
    from slime.arguments.args.router import RouterArgs
    from slime.arguments.args.sglang import SGLangArgs
    from slime.arguments.derived import DerivedArgs

    class Args(OwnArgs, MegatronArgs, SGLangArgs, RouterArgs, DerivedArgs, Namespace):
        """Every attribute of a run's arguments with its type."""

        # A plain Namespace has any attribute; these have the declared ones alone.
        __getattr__: None  # type: ignore[assignment, misc]
        __setattr__: None  # type: ignore[assignment, misc]

else:
    Args = Namespace
'''
KINDS: dict[Kind, str] = {
    "str": "str", "int": "int", "float": "float", "json": "Any", "human_int": "int", "nullable_str": "str",
    "layout": "int | list[int]",
}  # fmt: skip
"""The type that an option of that kind is converted to."""


def render() -> dict[str, str]:
    """File of the package -> its text."""
    pages = {"__init__.py": PACKAGE}
    for source, (module, name, title, declared) in CLASSES.items():
        body: list[str] = []
        for group, members in attributes(source).items():
            body += [f"\n    # {group}\n", *(_line(attribute, text) for attribute, text in members.items())]
        imported = [word for word in ("Any", "Literal") if any(word in line for line in body)]
        head = OPENING.format(about=f"{title} as attributes with their types.", source=declared)
        imports = f"\nfrom typing import {', '.join(imported)}\n" if imported else ""
        pages[f"{module}.py"] = f'{head}{imports}\n\nclass {name}:\n    """{title}."""\n{"".join(body)}'
    return pages


def attributes(source: str) -> dict[str, dict[str, str]]:
    """Group -> attribute -> annotation, of the flags of ``source`` and of the names that Megatron reads them by."""
    declared = {name: info.annotation for group in ALL_GROUPS for name, info in group.model_fields.items()}
    found: dict[str, dict[str, str]] = {}
    for flag in all_flags():
        if flag.source == source:
            text = spelled(declared[flag.dest]) if flag.dest in declared else annotation(flag)
            traits = flag.traits
            is_set = traits.follows or traits.resolved_by or flag.dest in RESOLVED
            resolved = text.removesuffix(" | None") if is_set else text
            found.setdefault(flag.group, {})[flag.dest] = resolved
    if source == "megatron":
        known = {name: text for members in found.values() for name, text in members.items()}
        fields = {field: known[dest] for dest, field in megatron.aliases().items() if dest in known}
        found[FIELDS] = {name: text for name, text in fields.items() if name not in known}
    return found


def annotation(flag: Flag) -> str:
    """The type of an attribute whose flag is passed on to another package."""
    if flag.action in ("true", "false", "tristate"):
        return "bool" if flag.default is not None else "bool | None"
    one = KINDS[flag.kind]
    if flag.nargs in ("+", "*") or isinstance(flag.nargs, int):
        one = f"{one} | list[{one}]" if flag.collapse else f"list[{one}]"
    if flag.action == "append":
        one = f"list[{one}]"
    if isinstance(flag.default, dict):  # pairs key=value, which the router makes a mapping of
        one = f"{one} | dict[str, str]"
    return one if flag.default is not None or one == "Any" else f"{one} | None"


def spelled(declared: Any) -> str:
    """The text of a declared annotation."""
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Annotated:
        return spelled(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(spelled(member) for member in inner)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(json.dumps, inner))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(spelled(member) for member in inner)}]"
    if declared in (dict, Any):
        return "Any" if declared is Any else "dict[str, Any]"
    return "None" if declared is type(None) else str(declared.__name__)


def _line(name: str, text: str) -> str:
    line = f"    {name}: {text}\n"
    if len(line) <= WIDTH + 1:
        return line
    before, _, rest = text.partition("[")  # a choice that is too long for a line: one value a line
    values, _, after = rest.rpartition("]")
    lines = "".join(f"        {value},\n" for value in values.split(", "))
    return f"    {name}: {before}[\n{lines}    ]{after}\n"


def differences() -> list[str]:
    """One line for every module that does not match the declarations."""
    return [
        f"slime/arguments/args/{name} does not match the declarations of flags; run `python -m tools.gen_args`"
        for name, text in render().items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the modules; with ``--check`` only list (exit status 1) those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write; fail when a module is out of date")
    if parser.parse_args().check:
        wrong = differences()
        print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
        return 1 if wrong else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
