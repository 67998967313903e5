"""``parse_args``: the command line, checked and derived, as one flat namespace."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from slime.arguments.availability import refuse_unavailable
from slime.arguments.command_line import AddCustomArguments, all_flags, build_parser, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.files import custom_config
from slime.arguments.flag import Flag
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.passthrough import megatron


def parse_args(
    argv: Sequence[str] | None = None, add_custom_arguments: AddCustomArguments | None = None
) -> argparse.Namespace:
    """Parse, check and derive. ``argv`` None reads ``sys.argv``.

    ``add_custom_arguments(parser)`` may add a user's own flags. On a wrong command line: a message on stderr and exit
    status 2 when ``sys.argv`` is read, an ``ArgumentError`` when ``argv`` is given. ``--help [WORD]`` prints and exits.
    ``args.explicit_flags`` (a frozenset of attributes) says what was given on the command line.
    """
    if callable(argv):  # slime <= 0.3.1 takes add_custom_arguments first
        argv, add_custom_arguments = None, argv
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        flags = all_flags()
        parser = build_parser(flags, add_custom_arguments)
        _answer_help(words, flags, parser)
        return resolve(words, flags, parser)
    except ArgumentError as error:
        if argv is not None:
            raise
        _exit(error)


def resolve(words: Sequence[str], flags: Sequence[Flag], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read ``words`` with ``parser``, fill defaults, apply every rule. Raises ``ArgumentError``."""
    from slime.arguments.rules import apply_rules

    given, ignored = read_words(parser, words, ignore_unknown="--ignore-unknown-flags" in words)
    if ignored:
        print(f"slime: ignoring unknown words: {' '.join(ignored)}", file=sys.stderr)
    given |= custom_config.read(given.get("custom_config_path"), flags)
    refuse_unavailable(given, flags)
    _check_required(given, flags)
    args = argparse.Namespace(**{flag.dest: copy.copy(flag.default) for flag in flags})
    for name, value in {**parser.custom_defaults, **given}.items():  # type: ignore[attr-defined]
        setattr(args, name, value)
    _check_groups(args, given)
    args.explicit_flags = frozenset(given)
    for name, value in megatron.config_defaults().items():
        setattr(args, name, value)
    apply_rules(args)
    for dest, field in megatron.aliases().items():
        setattr(args, field, getattr(args, dest))
    return args


def _check_required(given: dict[str, Any], flags: Sequence[Flag]) -> None:
    missing = [f"{flag.option} ({flag.help})" for flag in flags if flag.required and flag.dest not in given]
    if missing:
        raise ArgumentError("missing: " + "; ".join(missing))


def _check_groups(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Let every group's model check and convert what was given; all mistakes are reported at once."""
    messages: list[str] = []
    for group in ALL_GROUPS:
        names = [name for name in group.model_fields if name in given or name in args]
        try:
            model = group.model_validate({name: given[name] for name in names if name in given})
        except ValidationError as error:
            messages.extend(_validation_message(group, detail) for detail in error.errors())
            continue
        for name in model.model_fields_set:
            setattr(args, name, getattr(model, name))
    if messages:
        raise ArgumentError("\n".join(messages))


def _validation_message(group: Any, detail: Any) -> str:
    from slime.arguments.group import flags_of

    name = str(detail["loc"][0])
    option = next((f.option for f in flags_of(group) if f.dest == name), name)
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return f"{option}: {reason[0].lower()}{reason[1:]}, got {detail['input']!r}"


def _answer_help(words: Sequence[str], flags: Sequence[Flag], parser: argparse.ArgumentParser) -> None:
    place = next((i for i, word in enumerate(words) if word in ("--help", "-h")), None)
    if place is None:
        return
    from slime.arguments.help import custom_flags, help_text

    following = words[place + 1] if place + 1 < len(words) else None
    topic = following if following is not None and following not in ("-h", "--help") else None
    try:
        print(help_text([*flags, *custom_flags(parser, flags)], topic), flush=True)
    except BrokenPipeError:  # `--help | head`: nobody reads the rest
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (stays open until the process ends)
    sys.exit(0)


def _exit(error: ArgumentError) -> NoReturn:
    program = Path(sys.argv[0]).name
    program = "slime.arguments" if program in ("__main__.py", "-c", "") else program
    for line in str(error).splitlines():
        print(f"{program}: error: {line}", file=sys.stderr)
    print("`--help WORD` lists the flags that mention WORD.", file=sys.stderr)
    sys.exit(2)
