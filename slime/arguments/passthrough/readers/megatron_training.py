"""The arguments of a Megatron-LM checkout: the parser of its training scripts."""

from __future__ import annotations

import argparse
from typing import Any


class _Found(BaseException):
    """Carries the parser out of ``parse_args``; no ``except Exception`` on the way stops it."""


def read() -> argparse.ArgumentParser:
    """The parser with every group of ``megatron.training.arguments``, before any word is parsed."""
    from megatron.training import arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if hasattr(arguments, "add_megatron_arguments"):
        return arguments.add_megatron_arguments(parser) or parser
    return _parser_of(arguments)


def _parser_of(arguments: Any) -> argparse.ArgumentParser:
    """From releases that build the parser inside ``parse_args``: it is handed to the provider of extra arguments."""

    def take(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        raise _Found(parser)

    try:
        arguments.parse_args(extra_args_provider=take)
    except _Found as found:
        return found.args[0]
    raise RuntimeError("megatron.training.arguments.parse_args did not call extra_args_provider")
