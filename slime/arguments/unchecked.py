"""What rules found but do not refuse: things a dry run cannot look at, and warnings.

The lists of sentences live on the namespace while it is resolved: ``unchecked``, ``not_available``, ``warnings``.
"""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.arguments.errors import ArgumentError

logger = logging.getLogger(__name__)
FINDINGS = ("unchecked", "not_available", "warnings")


def begin(args: Namespace) -> None:
    """Give ``args`` empty lists of findings."""
    for name in FINDINGS:
        setattr(args, name, [])


def end(args: Namespace) -> None:
    """Take the lists away: plug-ins get a namespace of values."""
    for name in FINDINGS:
        delattr(args, name)


def missing(args: Namespace, message: str) -> None:
    """Say that something outside of the flags, such as a checkpoint, is not there.

    Raises ``ArgumentError``; under ``--dry-run``, which may run on another machine, the message is kept in
    ``args.unchecked`` instead.
    """
    if not getattr(args, "dry_run", False):
        raise ArgumentError(message)
    args.unchecked.append(message)


def warn(args: Namespace, message: str) -> None:
    """Tell the user, once the whole command line is accepted; at once where no command line is read."""
    if not hasattr(args, "warnings"):
        logger.warning("%s", message)
    elif message not in args.warnings:
        args.warnings.append(message)
