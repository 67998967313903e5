"""Flags that have no effect without another one: each that is given alone is warned about, in one sentence.

What cannot be meant at all is refused elsewhere; these come from launch scripts in which a block was switched off.
"""

from __future__ import annotations

import os

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_by_option, flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.traits import Needs


def is_present(args: Args, needed: str | Needs) -> bool:
    """True when ``args`` have what a flag needs: ``--a``, ``--a value`` or several, with ``or`` between them."""
    if isinstance(needed, Needs):
        return is_present(args, needed.option) or bool(needed.or_else(args))
    option = ""
    for words in needed.split(" or "):
        option, _, value = words.partition(" ") if words.startswith("--") else (option, "", words)
        found = getattr(args, flags_by_option()[option].dest)
        if str(found) == value if value else found not in (None, False, 0):
            return True
    return False


def check(args: Args) -> None:
    """Warn of flags given without the one they belong to; refuse trackers that have no place to write to."""
    given: frozenset[str] = args.explicit_flags
    alone: dict[str, list[str]] = {}
    for flag in flags_where(lambda traits: traits.needs):
        needed = flag.traits.needs
        if needed and flag.dest in given and getattr(args, flag.dest) != flag.default and not is_present(args, needed):
            alone.setdefault(needed.option if isinstance(needed, Needs) else needed, []).append(flag.option)
    for needed, options in alone.items():
        verb = "has" if len(options) == 1 else "have"
        diagnostics.warn(args, f"{' and '.join(options)} {verb} no effect without {needed}")
    if "micro_batch_size" in given and args.micro_batch_size != 1 and args.use_dynamic_batch_size:
        diagnostics.warn(
            args, f"--micro-batch-size {args.micro_batch_size} has no effect with --use-dynamic-batch-size"
        )
    if args.use_tensorboard and args.tb_project_name is None and not os.environ.get("TENSORBOARD_DIR"):
        raise ArgumentError(
            "--use-tensorboard needs --tb-project-name NAME or the environment variable TENSORBOARD_DIR"
        )
