"""Model flags that were not given: the values that describe the checkpoint in ``--hf-checkpoint``."""

from __future__ import annotations

import itertools
import shlex
from argparse import ArgumentParser
from collections.abc import Collection
from typing import Any

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.availability import unavailable_messages
from slime.arguments.command_line import flags_by_option
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag, add_to_parser
from slime.arguments.rules import hf_config
from slime.models.megatron_flags import ModelFlag, describe, plain
from slime.models.shape import DESCRIBED_BY

SIZES = frozenset(DESCRIBED_BY)
"""A command line with these describes the model itself."""
DROPOUT = ("hidden_dropout", "attention_dropout")


def take_from_checkpoint(args: Args) -> None:
    """Set the model flags that were not given; without a readable checkpoint, or without a trainer, nothing changes."""
    if args.debug_rollout_only:
        return
    found = hf_config.config_of(args)
    if found is None:
        return
    config, name = found
    # Given is what a user has chosen, on the command line, in a file or as their own default.
    flags = [flags_by_option()[flag.option] for flag in describe(config).flags if flag.option in flags_by_option()]
    chosen = {flag.dest for flag in flags if getattr(args, flag.dest) != flag.default}
    values = fill(args, config, {*args.explicit_flags, *chosen})
    if refused := unavailable_messages(values, flags_by_option().values()):
        message = f"{name} describes a model that this version cannot train: {refused[0]}"
        if not args.dry_run:
            raise ArgumentError(message)
        args.not_available.append(message)


def fill(args: Args, config: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Set the model flags whose attribute is not in ``given`` to what ``config`` and its family say; return them.

    A command line that describes the model itself (``SIZES``) keeps Megatron's defaults for what only decides how it is
    computed, so that such a run stays what it was. Of a family that is not known nothing is set then either, unless the
    user builds the model: its numbers alone describe another one.
    """
    described, values = SIZES.issubset(given), {}
    own = hf_config.is_own_model(args, describe(config))
    if hf_config.family_is_unknown(config) and not (described or own):
        return {}
    for wanted in describe(config).flags:
        flag = flags_by_option().get(wanted.option)
        if flag is not None and flag.dest not in given and (not described or _decides(wanted, own)):
            value = _value(flag, wanted)
            if value is not None:
                values[flag.dest] = value
    vars(args).update(values)
    return values


def taken(args: Args) -> dict[str, list[str]]:
    """Attribute -> the words of a command line, of the flags that ``take_from_checkpoint`` has changed."""
    found = None if args.debug_rollout_only else hf_config.config_of(args)
    words: dict[str, list[str]] = {}
    for wanted in describe(found[0]).flags if found is not None else ():
        flag = flags_by_option().get(wanted.option)
        if flag is None or flag.dest in args.explicit_flags:
            continue
        value = _value(flag, wanted)
        if value is not None and value != flag.default and getattr(args, flag.dest) == value:
            words[flag.dest] = wanted.words()
    return words


def summary(args: Args) -> list[tuple[str, str]]:
    """Return what a run reports of its model: the flags that come from its configuration, and its dropout."""
    if args.debug_rollout_only:
        return []
    found, words = hf_config.config_of(args), shlex.join(itertools.chain(*taken(args).values()))
    rates = {"hidden": args.hidden_dropout, "attention": args.attention_dropout}
    dropout = ", ".join(f"{name} {plain(rate)}" for name, rate in rates.items() if rate)
    rows = [("dropout", dropout or "none")]
    return [(f"from {found[1]}", words), *rows] if found is not None and words else rows


def warn_of_dropout(args: Args) -> None:
    """Dropout is seldom meant: the first optimizer step compares policies that differ by it."""
    chosen = [f"--{name.replace('_', '-')} {plain(getattr(args, name))}" for name in DROPOUT if getattr(args, name)]
    if chosen and not args.debug_rollout_only and args.loss_type != "sft_loss":
        diagnostics.warn(
            args,
            f"{' '.join(chosen)}: only training drops values, neither the engines nor the passes that take log-probs "
            "do, so that probability ratios differ from 1 before anything is learned; leave it out for no dropout",
        )


def _decides(wanted: ModelFlag, own: bool) -> bool:
    """Return True if a run that describes its model would be refused without this flag."""
    if own:
        return wanted.checked and bool(wanted.key)
    return wanted.checked or wanted.option == "--spec"


def _value(flag: Flag, wanted: ModelFlag) -> Any:
    """Return the value that the command line would have made of it; None for a flag that is not to be given."""
    words = wanted.words()
    if not words:
        return None
    parser = ArgumentParser(add_help=False)
    add_to_parser(parser, flag)
    return getattr(parser.parse_args(words), flag.dest)
