"""From words to values: every known flag, unknown ones with the nearest spelling, no abbreviations."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Append, Flag, add_opposite, add_to_parser, first_of_each
from slime.arguments.groups import slime_flags
from slime.arguments.passthrough import catalog, router, sglang
from slime.arguments.passthrough.megatron import megatron_flags
from slime.arguments.spelling import (
    dashes_are_foreign,
    hydra_message,
    looks_like_flag,
    nearest,
    parser_message,
    stray_message,
)
from slime.arguments.traits import Traits
from slime.utils.secrets import mask_words

OF_YOUR_OWN = (
    "flags of your own code are declared by a function that --custom-arguments-path names; --ignore-unknown-flags "
    "drops such flags with a warning"
)
AddCustomArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, exits and usage walls: an error is an ``ArgumentError``."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(parser_message(message))


@cache
def all_flags() -> tuple[Flag, ...]:
    """Every known flag. slime's declarations win over those of the same option or attribute elsewhere."""
    return tuple(first_of_each([*slime_flags(), *megatron_flags(), *sglang.sglang_flags(), *router.router_flags()]))


def flags_where(condition: Callable[[Traits], object]) -> list[Flag]:
    """The flags of whose traits ``condition`` is true."""
    return [flag for flag in all_flags() if condition(flag.traits)]


@cache
def flags_by_option() -> dict[str, Flag]:
    """Option -> the flag that has it."""
    return {option: flag for flag in all_flags() for option in flag.options}


def build_parser(
    flags: Sequence[Flag], add_custom_arguments: AddCustomArguments | None = None
) -> argparse.ArgumentParser:
    """A parser that leaves attributes only for flags that were given.

    A user's ``add_custom_arguments`` may add flags and set defaults; these are kept in ``parser.custom_defaults``, and
    options by attribute of added flags that must be given, here or in a file, in ``parser.custom_required``.
    Raises ``ArgumentError`` when a user's flag has the name of a known one.
    """
    parser = _Parser(prog="train.py", allow_abbrev=False, add_help=False)
    group = parser.add_argument_group()  # a parser itself asks for the size of the terminal once per flag: 20 ms
    for flag in flags:
        add_to_parser(group, flag)
    custom: dict[str, Any] = {}
    required: dict[str, str] = {}
    if add_custom_arguments is not None:
        known = set(parser._actions)
        try:
            parser = add_custom_arguments(parser) or parser  # type: ignore[assignment]
        except argparse.ArgumentError as error:
            raise ArgumentError(f"add_custom_arguments adds a flag that exists already: {error}") from error
        for action in parser._actions:
            if action.default is not argparse.SUPPRESS:  # set_defaults changes those of known flags too
                custom[action.dest] = action.default
                action.default = argparse.SUPPRESS
            if action.required and action not in known and action.option_strings:
                required[action.dest] = action.option_strings[0]
                action.required = False
        custom.update(parser._defaults)
        parser._defaults.clear()
    for flag in slime_flags():
        add_opposite(group, flag)
    parser.custom_defaults = custom  # type: ignore[attr-defined]
    parser.custom_required = required  # type: ignore[attr-defined]
    return parser


def get_slime_extra_args_provider(
    add_custom_arguments: AddCustomArguments | None = None,
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """A function that adds slime's flags to a parser and returns it, for tools with their own Megatron parser.

    The user's flags come first. A flag the parser has already keeps its form and gets slime's default.
    """

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser) or parser
        known = parser._option_string_actions
        for flag in slime_flags():
            if not any(option in known for option in flag.options):
                add_to_parser(parser, flag)
            parser.set_defaults(**{flag.dest: flag.default})
        return parser

    return provider


def read_words(
    parser: argparse.ArgumentParser, words: Sequence[str], *, ignore_unknown: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Parse ``words``; return the attributes that were given and the unknown words (with ``ignore_unknown``).

    Raises ``ArgumentError`` for unknown flags (all of them at once, each with its nearest spelling), values of the
    wrong type and words that belong to no flag.
    """
    known = parser._option_string_actions
    foreign = [message for word in _outside_of_values(words, known) if (message := hydra_message(word))]
    if foreign and not ignore_unknown:
        raise ArgumentError("\n".join(foreign))
    unknown = [w.split("=", 1)[0] for w in words if looks_like_flag(w, known) and w.split("=", 1)[0] not in known]
    if unknown and not ignore_unknown:
        messages = [_unknown_message(name, known) for name in dict.fromkeys(unknown)]
        own = [OF_YOUR_OWN] if any(may_be_own for _, may_be_own in messages) else []
        raise ArgumentError("\n".join([*(message for message, _ in messages), *own]))
    for name, equals, value in (word.partition("=") for word in words):
        if equals and value == "--" and name in known and known[name].nargs != 0:  # argparse makes a list of it
            raise ArgumentError(f"{name}: expected a value, got '--'")
    namespace, rest = parser.parse_known_args(list(words))
    if rest and not unknown:
        raise ArgumentError(stray_message(rest[0], words, known))
    return vars(namespace), rest


def _outside_of_values(words: Sequence[str], known: Mapping[str, argparse.Action]) -> list[str]:
    """``words`` without known flags and their values: a value may look like anything."""
    outside, takes = [], 0.0
    for word in words:
        name, equals, _ = word.partition("=")
        if name in known:
            takes = 0 if equals else _most_values(known[name])
        elif takes > 0:
            takes -= 1
        else:
            outside.append(word)
    return outside


def _most_values(action: argparse.Action) -> float:
    """Return how many words after a flag may be its values."""
    if action.nargs in ("+", "*", argparse.REMAINDER):
        return math.inf
    return action.nargs if isinstance(action.nargs, int) else 1


COLLECTING = (Append, argparse._AppendAction, argparse._AppendConstAction, argparse._CountAction)


def repeated_messages(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return a sentence for every flag that is given more than once with different values, of which the last holds."""
    known = parser._option_string_actions
    given: dict[str, list[list[str]]] = {}
    use: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in known:
            use = [name, value] if equals else [name]
            given.setdefault(known[name].dest, []).append(use)
        else:
            use.append(word)
    messages = []
    for uses in given.values():
        if not isinstance(known[uses[0][0]], COLLECTING) and any(use != uses[0] for use in uses):
            last = " ".join(mask_words(uses[-1]))
            messages.append(f"{uses[0][0]} is given {len(uses)} times; the last one holds: {last}")
    return messages


def _unknown_message(name: str, known: Mapping[str, argparse.Action]) -> tuple[str, bool]:
    """Return what is wrong with ``name``, and whether it may be a flag of the user's own that was not declared."""
    owned = {**sglang.owned_options(), **router.owned_options()}
    if name in owned:
        return f"{name} is set by slime itself: {owned[name]}", False
    positive = "--" + name.removeprefix("--no-").replace("_", "-")
    if name.startswith("--no-") and positive in known and known[positive].nargs == 0:
        return f"unknown flag {name}; {positive} is off unless it is given, here or in the --config file", True
    guess = nearest(name, list(known))
    offered = f"; {package} has no such flag" if (package := _package(name)) else ""
    if guess is None:
        stem = name.lstrip("-").removeprefix("sglang-").removeprefix("router-")
        word = max(re.split(r"[-_]", stem), key=len)
        return f"unknown flag {name}{offered}; `--help {word}` lists the flags that mention {word!r}", True
    if dashes_are_foreign(name):
        pasted = "begins with a dash that is no hyphen, as pasted from a formatted text"
        return f"{name} {pasted}; did you mean {guess}?", False
    return f"unknown flag {name}{offered}; did you mean {guess}?", True


def _package(name: str) -> str | None:
    """The package whose flags have the prefix of ``name``, with its version: what it offers depends on that."""
    if name.startswith("--sglang-"):
        return f"SGLang {catalog.version_words(catalog.SGLANG)}"
    if name.startswith("--router-"):
        return f"sglang-router {catalog.version_words(catalog.ROUTER)}"
    return None
