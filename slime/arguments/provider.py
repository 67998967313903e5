"""slime's flags for tools that bring a Megatron parser of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slime.arguments.command_line import AddCustomArguments
from slime.arguments.flag import add_to_parser
from slime.arguments.groups import slime_flags


def get_slime_extra_args_provider(
    add_custom_arguments: AddCustomArguments | None = None,
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """A function that adds slime's flags to a parser and returns it.

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
