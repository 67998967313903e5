"""Flags of a user's own: the functions that add them to the parser."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from typing import Any

from slime.arguments.command_line import AddCustomArguments
from slime.arguments.errors import ArgumentError

OPTION = "--custom-arguments-path"
VARIABLE = "SLIME_CUSTOM_ARGUMENTS_PATH"


def found(words: Sequence[str], given: AddCustomArguments | None) -> AddCustomArguments | None:
    """The function ``given`` by the caller and then that of ``--custom-arguments-path`` or its variable, as one.

    None without either. Raises ``ArgumentError`` for a path that cannot be loaded.
    """
    path, source = _path(words)
    functions = [function for function in (given, _load(path, source) if path else None) if function is not None]
    if len(functions) < 2:
        return functions[0] if functions else None

    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for function in functions:
            parser = function(parser) or parser
        return parser

    return both


def _path(words: Sequence[str]) -> tuple[str | None, str]:
    """The dotted path and where it was said; it is needed before there is a parser that could read the words."""
    if path := _value_of(OPTION, words):
        return path, OPTION
    if (file := _value_of("--config", words)) and (path := _in_file(file)):
        return path, f"--config {file}: {OPTION}"
    return os.environ.get(VARIABLE) or None, VARIABLE


def _value_of(option: str, words: Sequence[str]) -> str | None:
    last = None
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, joined = word.partition("=")
        if name == option:
            last = joined if equals else following
    return last


def _in_file(path: str) -> str | None:
    """What the file of ``--config`` says; what is wrong with the file is found out when all of it is read."""
    from slime.arguments.files import yaml_source

    try:
        data = yaml_source.read(path, "--config").data
    except ArgumentError:
        return None
    section = data.get("arguments")
    value = (section if isinstance(section, dict) else data).get(OPTION[2:].replace("-", "_"))
    return value if isinstance(value, str) else None


def _load(path: str, source: str) -> Any:
    from slime.utils.misc import load_function

    try:
        function = load_function(path, source)
    except (ValueError, ImportError, AttributeError) as error:
        raise ArgumentError(str(error)) from error
    if not callable(function):
        raise ArgumentError(
            f"{source} {path}: expected a function that takes the parser, got {type(function).__name__}"
        )
    return function
