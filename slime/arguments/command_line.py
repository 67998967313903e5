"""From words to values: every known flag, unknown ones with the nearest spelling, no abbreviations."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag, add_to_parser
from slime.arguments.groups import slime_flags
from slime.arguments.passthrough import router, sglang
from slime.arguments.passthrough.megatron import megatron_flags

AddCustomArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, exits and usage walls: an error is an ``ArgumentError``."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(re.sub(r"^argument (--\S+?)(?:/--\S+)*: ", r"\1: ", message))


@cache
def all_flags() -> tuple[Flag, ...]:
    """Every known flag. slime's declarations win over Megatron's of the same option or attribute."""
    own = slime_flags()
    options = {o for flag in own for o in flag.options}
    dests = {flag.dest for flag in own}
    passed = [*megatron_flags(), *sglang.sglang_flags(), *router.router_flags()]
    kept = [flag for flag in passed if flag.dest not in dests and not options.intersection(flag.options)]
    return (*own, *kept)


def build_parser(
    flags: Sequence[Flag], add_custom_arguments: AddCustomArguments | None = None
) -> argparse.ArgumentParser:
    """A parser that leaves attributes only for flags that were given.

    A user's ``add_custom_arguments`` may add flags and set defaults; these are kept in ``parser.custom_defaults``.
    Raises ``ArgumentError`` when a user's flag has the name of a known one.
    """
    parser = _Parser(prog="train.py", allow_abbrev=False, add_help=False)
    for flag in flags:
        add_to_parser(parser, flag)
    custom: dict[str, Any] = {}
    known = len(parser._actions)
    if add_custom_arguments is not None:
        try:
            parser = add_custom_arguments(parser) or parser  # type: ignore[assignment]
        except argparse.ArgumentError as error:
            raise ArgumentError(f"add_custom_arguments adds a flag that exists already: {error}") from error
        for action in parser._actions[known:]:
            if action.default is not argparse.SUPPRESS:
                custom[action.dest] = action.default
                action.default = argparse.SUPPRESS
        custom.update(parser._defaults)
        parser._defaults.clear()
    parser.custom_defaults = custom  # type: ignore[attr-defined]
    return parser


def read_words(
    parser: argparse.ArgumentParser, words: Sequence[str], *, ignore_unknown: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Parse ``words``; return the attributes that were given and the words nobody knows (with ``ignore_unknown``).

    Raises ``ArgumentError`` for unknown flags (all of them at once, each with its nearest spelling), values of the
    wrong type and words that belong to no flag.
    """
    known = parser._option_string_actions
    unknown = [w.split("=", 1)[0] for w in words if _looks_like_flag(w) and w.split("=", 1)[0] not in known]
    if unknown and not ignore_unknown:
        raise ArgumentError("\n".join(_unknown_message(name, list(known)) for name in dict.fromkeys(unknown)))
    namespace, rest = parser.parse_known_args(list(words))
    if rest and not unknown:
        raise ArgumentError(_stray_message(rest[0], list(words), known))
    return vars(namespace), rest


def _looks_like_flag(word: str) -> bool:
    return bool(re.match(r"-{1,2}[A-Za-z]", word)) and " " not in word


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known option a user most likely meant, or None."""
    stem = name.lstrip("-").replace("_", "-")
    exact = {k.lstrip("-"): k for k in known}
    for candidate in (stem, "sglang-" + stem, "router-" + stem, stem.removeprefix("no-"), "no-" + stem):
        if candidate in exact:
            return exact[candidate]
    matches = difflib.get_close_matches(stem, list(exact), n=1, cutoff=0.72)
    return exact[matches[0]] if matches else None


def _unknown_message(name: str, known: Sequence[str]) -> str:
    owned = {**sglang.owned_options(), **router.owned_options()}
    if name in owned:
        return f"{name} is set by slime itself: {owned[name]}"
    guess = nearest(name, known)
    if guess is None:
        word = max(re.split(r"[-_]", name.lstrip("-")), key=len)
        return f"unknown flag {name}; `--help {word}` lists the flags that mention {word!r}"
    return f"unknown flag {name}; did you mean {guess}?"


def _stray_message(word: str, words: list[str], known: dict[str, argparse.Action]) -> str:
    place = words.index(word) if word in words else -1
    before = next((w for w in reversed(words[: max(place, 0)]) if w in known), None)
    if before is None:
        return f"unexpected word {word!r}: every value belongs to a flag"
    action = known[before]
    if action.nargs == 0:
        return f"unexpected word {word!r} after {before}: it is a switch and takes no value"
    return f"unexpected word {word!r}: {before} takes one value; quote a value that contains spaces"
