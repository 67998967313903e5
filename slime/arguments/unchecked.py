"""What rules found but do not refuse at once: things a dry run cannot look at, warnings, and what is missing.

The lists of sentences live on the namespace while it is resolved: ``unchecked``, ``not_available``, ``warnings``, and
``needed``, which has one sentence per attribute.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from slime.arguments.errors import ArgumentError

logger = logging.getLogger(__name__)
FINDINGS = ("unchecked", "not_available", "warnings", "needed")


def begin(args: Namespace) -> None:
    """Give ``args`` empty lists of findings."""
    for name in FINDINGS:
        setattr(args, name, {} if name == "needed" else [])


def end(args: Namespace) -> None:
    """Take the lists away: plug-ins get a namespace of values."""
    for name in FINDINGS:
        delattr(args, name)


def missing(args: Namespace, message: str) -> None:
    """Say that something outside of the flags, such as a checkpoint, is not there.

    Raises ``ArgumentError``; under ``--dry-run``, which may run on another machine, and where something only stands in
    for the checkpoint the message is kept in ``args.unchecked`` instead.
    """
    if not getattr(args, "dry_run", False) and "hf_checkpoint" not in needed(args):
        raise ArgumentError(message)
    args.unchecked.append(message)


def need(args: Namespace, name: str, message: str, stand_in: Any = None) -> None:
    """Say that the flag of the attribute ``name`` must be given.

    All that is missing is said at once, so the rules go on with ``stand_in``. Raises ``ArgumentError`` where no command
    line is read.
    """
    if not hasattr(args, "needed"):
        raise ArgumentError(message)
    args.needed[name] = message
    setattr(args, name, stand_in)


def needed(args: Namespace) -> dict[str, str]:
    """Attribute -> what is said of its flag, which is missing."""
    return getattr(args, "needed", {})


def warn(args: Namespace, message: str) -> None:
    """Tell the user, once the whole command line is accepted; at once where no command line is read."""
    if not hasattr(args, "warnings"):
        logger.warning("%s", message)
    elif message not in args.warnings:
        args.warnings.append(message)
