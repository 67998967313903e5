"""``Flag``: one command-line flag, whoever declares it (slime, Megatron, SGLang or the router).

Every source is turned into plain ``Flag`` records. The parser, ``--help``, the reference page and the YAML view read
nothing else, and the records of installed packages can be stored as JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from slime.arguments.traits import NONE, Traits

Kind = Literal["str", "int", "float", "json", "human_int", "nullable_str", "layout"]
Action = Literal["value", "true", "false", "tristate", "append"]


@dataclass(frozen=True)
class Flag:
    """One flag: ``options`` on the command line, ``dest`` on the namespace.

    ``action``: ``value`` takes a value, ``true``/``false`` are switches that store that constant, ``tristate`` is
    ``--x`` / ``--no-x`` with the default meaning "not said", ``append`` collects repeated uses.
    ``collapse``: one value of an ``nargs`` list is stored as a scalar (Megatron's "one or one per layer" flags).
    ``field``: the name of the same thing in the package's own configuration class when it differs from ``dest``.
    ``traits``: what else is true of it.
    """

    dest: str
    options: tuple[str, ...]
    default: Any = None
    kind: Kind = "str"
    action: Action = "value"
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    const: Any = None
    collapse: bool = False
    help: str = ""
    group: str = ""
    source: str = "slime"
    field: str | None = None
    required: bool = False
    traits: Traits = NONE

    @property
    def option(self) -> str:
        """The spelling used in messages and documents."""
        return self.options[0]


_SCALES = {
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def human_int(text: str) -> int:
    """``"4096"``, ``"25.6k"`` (thousands) or ``"128Ki"`` (1024s): SGLang's spelling of large numbers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    if "." in number and suffix.endswith("i"):
        raise ValueError(f"decimals are not allowed with {suffix}")
    return int(Decimal(number) * _SCALES[suffix])


def nullable_str(text: str) -> str | None:
    """Return ``None`` for an empty value or the word None."""
    return None if text in ("", "None", "none", "null") else text


def layout(text: str) -> int | list[int]:
    """A frequency or a pattern per layer: ``2``, ``[0,1,1]``, ``([0]*3+[1]*58)`` or ``128,0``.

    Only integers, lists, ``+`` and ``*`` are understood; nothing is executed.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(left, list) and isinstance(right, int) and len(left) * right > 100_000:
                raise ValueError(f"{text!r} makes a list of more than 100000 entries")
            return left * right
        raise ValueError(f"{text!r} is neither an integer nor a list like [0]*3+[1]*58")

    try:
        result = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is neither an integer nor a list like [0]*3+[1]*58") from error
    return result


CONVERTERS: dict[Kind, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "json": json.loads,
    "human_int": human_int,
    "nullable_str": nullable_str,
    "layout": layout,
}
KIND_WORDS: dict[Kind, str] = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "json": 'JSON, for example \'{"name": "value"}\'',
    "human_int": "an integer (20k and 128Ki are understood)",
    "nullable_str": "text",
    "layout": "an integer or a list like [0]*3+[1]*58",
}


def _converter(flag: Flag) -> Callable[[str], Any]:
    convert = CONVERTERS[flag.kind]

    def checked(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError as error:
            seen = repr(text) if text else "nothing (the value follows = without a space)"
            raise argparse.ArgumentTypeError(f"expected {KIND_WORDS[flag.kind]}, got {seen}") from error
        if flag.choices is not None and value not in flag.choices:
            choices = ", ".join(map(str, flag.choices))
            one_of = "one of " if len(flag.choices) > 1 else ""
            raise argparse.ArgumentTypeError(f"expected {one_of}{choices}, got {text!r}")
        return value

    return checked


class _Collapse(argparse.Action):
    """Store one value as a scalar and several as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values[0] if isinstance(values, list) and len(values) == 1 else values)


class _Tristate(argparse.Action):
    """``--x`` stores True, ``--no-x`` False."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


class Append(argparse.Action):
    """Collect repeated uses into a fresh list (argparse's own extends the default)."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), values])


def first_of_each(flags: Iterable[Flag]) -> list[Flag]:
    """The flags without those that repeat an attribute or an option of an earlier one."""
    kept: list[Flag] = []
    dests: set[str] = set()
    options: set[str] = set()
    for flag in flags:
        if flag.dest not in dests and not options.intersection(flag.options):
            kept.append(flag)
            dests.add(flag.dest)
            options.update(flag.options)
    return kept


def opposite_of(flag: Flag) -> str | None:
    """The option that gives a switch its default back: ``--no-x`` of ``--x``, ``--x`` of ``--disable-x``."""
    if flag.action not in ("true", "false"):
        return None
    name = flag.options[0].removeprefix("--")
    for prefix in ("disable-", "no-"):
        if name.startswith(prefix):
            return f"--{name.removeprefix(prefix)}"
    return f"--no-{name}"


def add_opposite(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """Register the opposite of a switch, unless a flag has that name."""
    option = opposite_of(flag)
    if option is not None and option not in parser._option_string_actions:
        back = "store_true" if flag.default else "store_false"
        parser.add_argument(option, action=back, dest=flag.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_to_parser(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """Register ``flag``; a flag that is not on the command line leaves no attribute (defaults are filled later)."""
    common: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if flag.action in ("true", "false"):
        parser.add_argument(*flag.options, action="store_" + flag.action, **common)
        return
    if flag.action == "tristate":
        parser.add_argument(*flag.options, action=_Tristate, nargs=0, **common)
        return
    common.update(type=_converter(flag), metavar=flag.dest.upper())
    if flag.nargs is not None:
        common["nargs"] = flag.nargs
    if flag.const is not None:
        common["const"] = flag.const
    action: Any = Append if flag.action == "append" else _Collapse if flag.collapse else "store"
    parser.add_argument(*flag.options, action=action, **common)
