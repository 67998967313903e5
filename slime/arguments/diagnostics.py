"""Findings of the rules that are not raised at once: warnings, missing flags, and what a dry run cannot check.

While the namespace is resolved it has these lists of sentences: ``unchecked``, ``not_available``, ``warnings``, and
``needed``, which has one sentence per attribute.
"""

from __future__ import annotations

import logging

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError

logger = logging.getLogger(__name__)
FINDINGS = ("unchecked", "not_available", "warnings", "needed")


def begin(args: Args) -> None:
    """Give ``args`` empty lists of findings."""
    for name in FINDINGS:
        setattr(args, name, {} if name == "needed" else [])


def end(args: Args) -> None:
    """Remove the lists: hooks get a namespace of values."""
    for name in FINDINGS:
        delattr(args, name)


def unavailable(args: Args, message: str) -> None:
    """Report that something outside of the flags, such as a checkpoint, is not there.

    Raises ``ArgumentError``. Under ``--dry-run``, which may run on another machine, and where a stand-in replaces the
    checkpoint, the message is kept in ``args.unchecked`` instead.
    """
    if not args.dry_run and "hf_checkpoint" not in missing_flags(args):
        raise ArgumentError(message)
    args.unchecked.append(message)


def not_available(args: Args, message: str) -> None:
    """Report a feature that this version does not have. Raises ``ArgumentError``; a dry run lists it."""
    if not args.dry_run:
        raise ArgumentError(message)
    args.not_available.append(message)


def missing_flag(args: Args, name: str, message: str, stand_in: object = None) -> None:
    """Report that the flag of the attribute ``name`` must be given.

    All missing flags are reported together, so the rules continue with ``stand_in``. Raises ``ArgumentError`` where no
    command line is parsed.
    """
    if not hasattr(args, "needed"):
        raise ArgumentError(message)
    args.needed[name] = message
    setattr(args, name, stand_in)


def missing_flags(args: Args) -> dict[str, str]:
    """Attribute -> message, for every flag that is missing."""
    return getattr(args, "needed", {})


def warn(args: Args, message: str) -> None:
    """Warn after the whole command line is accepted; log at once where no command line is parsed."""
    if not hasattr(args, "warnings"):
        logger.warning("%s", message)
    elif message not in args.warnings:
        args.warnings.append(message)
