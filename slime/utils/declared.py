"""Declared defaults for namespaces that did not come from ``parse_args``: those of tests and of programs of one's own.

slime reads every flag as ``args.x``. Public functions that take ``args`` call ``with_defaults`` first, so that a caller
needs to set only what it wants to set.
"""

from __future__ import annotations

import argparse
import copy
import functools
from importlib import import_module
from typing import Any, TypeVar

Args = TypeVar("Args")

PARSED = "explicit_flags"
"""The attribute that every parsed namespace has, and every one that was completed here."""

DERIVED: dict[str, Any] = {
    "continues_own_checkpoints": False,
    "eval_datasets": [],
    "log_probs_only": False,
    "role_values": {},
    "rollout_external": False,
    "rollout_external_engine_infos": None,
    "rollout_num_engines": None,
    "serve_only": False,
    "use_critic": False,
}
"""Attributes that the rules set and that are no flags: the values of a run without any flag."""


def with_defaults(args: Args) -> Args:
    """Return ``args``, after setting every declared flag that it lacks to its default, in place.

    Flags that have no default, such as ``--hf-checkpoint``, stay absent. An object that takes no further attributes is
    replaced by a namespace with all of its attributes. Parsed arguments, and None, are returned as they are.
    """
    if args is None or hasattr(args, PARSED):
        return args
    missing = {name: value for name, value in _defaults().items() if not hasattr(args, name)}
    for flag in _flags():
        if flag.dest in missing and hasattr(args, flag.traits.follows or ""):
            missing[flag.dest] = getattr(args, flag.traits.follows)
    missing = {name: copy.copy(value) for name, value in missing.items()}
    try:
        for name, value in missing.items():
            setattr(args, name, value)
    except (AttributeError, TypeError):
        own = {name: getattr(args, name) for name in dir(args) if not name.startswith("__")}
        return argparse.Namespace(**{**missing, **own})  # type: ignore[return-value]
    return args


def _flags() -> Any:
    return import_module("slime.arguments.command_line").all_flags()  # by name: it is a layer above


@functools.cache
def _defaults() -> dict[str, Any]:
    return {**{flag.dest: flag.default for flag in _flags() if not flag.required}, **DERIVED, PARSED: frozenset()}
