"""The engines of ``--sglang-config`` and ``--prefill-num-servers``: whole ones, on whole nodes."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.placement import engines_of, models_of


def check(args: Namespace) -> None:
    """Plan the engines as the run does, and count them."""
    if args.rollout_external or args.debug_train_only or models_of(args) is None:
        return
    try:
        args.rollout_num_engines = len(engines_of(args))
    except ArgumentError:
        raise
    except ValueError as error:
        option = f"--sglang-config {args.sglang_config}: " if args.sglang_config is not None else ""
        raise ArgumentError(f"{option}{error}") from error
