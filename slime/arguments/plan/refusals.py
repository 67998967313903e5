"""What a real run would refuse of a command line that the rules accept."""

from __future__ import annotations

import copy
from argparse import Namespace

from slime.arguments.errors import ArgumentError


def refused(args: Namespace, *, overlap: bool) -> list[str]:
    """Return one sentence for each: features that are not built yet, and flags that the loop cannot follow."""
    from slime.arguments.plan.loop import refuse_impossible_loop

    found = list(getattr(args, "not_available", ()))
    try:
        refuse_impossible_loop(args, overlap=overlap)
    except ArgumentError as error:
        found.append(str(error))
    return found


def refused_without_gpus(args: Namespace) -> str | None:
    """Return what a machine without GPUs refuses in ``args``; None when it runs them as processes."""
    from slime.arguments.device import finalize_for_device

    try:
        finalize_for_device(copy.deepcopy(args), "cpu")
    except ArgumentError as error:
        return str(error)
    return None
