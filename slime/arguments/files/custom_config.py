"""``--custom-config-path``: a YAML mapping of namespace attributes, of flags and of users' own plug-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from slime.arguments.files.flag_values import FlagNames, read_flags
from slime.arguments.files.yaml_source import read as read_yaml
from slime.arguments.flag import Flag
from slime.arguments.spelling import nearest

OPTION = "--custom-config-path"
logger = logging.getLogger(__name__)

NAMES_OF_EXAMPLES = frozenset({"tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "use_rs", "rs_level"})
"""No mistakes, however much they look like flags: published plug-ins read them."""


def read(path: str | None, flags: Iterable[Flag], warn: Callable[[str], object] | None = None) -> dict[str, Any]:
    """Attribute -> value of the file; values of flags are typed and checked as on the command line.

    They count as given, so every check sees them. Other names are attributes of users' own plug-ins. ``warn`` receives
    what is to be said about the file. Raises ``ArgumentError`` for all mistakes at once.
    """
    if path is None:
        return {}
    names = FlagNames.of(flags)
    document = read_yaml(path, OPTION)
    found, others = read_flags(document, (), names)
    own: dict[str, Any] = {}
    for name, place in others.items():
        if not name.replace("-", "_").isidentifier():
            document.note(place, "expected the name of an attribute: letters, digits and underscores")
        own[name.replace("-", "_")] = document.value(place)
    document.check()
    if warn is not None:
        for message in document.warnings:
            warn(message)
    for name, value in found.items():
        logger.info("%s sets %s to %r", OPTION, name, value)
    return {**found, **own}


def own_names(path: str | None, flags: Iterable[Flag]) -> frozenset[str]:
    """The attributes in the file that belong to no flag."""
    return frozenset(read(path, flags)) - {flag.dest for flag in flags}


def look_alikes(path: str | None, given: Iterable[str], flags: Iterable[Flag]) -> list[str]:
    """A sentence for every attribute in ``given`` that is no flag but spelled almost like one: a mistyped flag?"""
    if path is None:
        return []
    known = {flag.dest for flag in flags}
    options = ["--" + name.replace("_", "-") for name in known]
    found = []
    for name in sorted(set(given) - known - NAMES_OF_EXAMPLES):
        guess = nearest("--" + name.replace("_", "-"), options)
        if guess is not None:
            meant = guess[2:].replace("-", "_")
            found.append(f"{OPTION} {path}: no flag is named {name}; it is kept for plug-ins. Did you mean {meant}?")
    return found
