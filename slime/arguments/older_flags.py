"""Flags of older releases, of slime <= 0.3.0 and of SGLang 0.4.9 to 0.5.19: what they are called, or mean, now.

One table, ``older_flags.tsv``, says it; the command line, YAML files and the reference page read nothing else. A name
that the installed packages still offer is none of its business. The columns:

* the option, ``=value`` where a row is about one value;
* what follows it: nothing written for a flag with another name, else ``switch``, ``text``, ``texts`` or ``optional``;
* what it is now: an option, which takes the values; several words, which a switch (or that value) means;
  ``critic`` and an option, whose value for the critic it is; ``-`` for nothing, ``!`` when it would change the run;
* why, or what to do instead.
"""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.spelling import looks_like_flag

TABLE = Path(__file__).with_suffix(".tsv")
NOTHING, REFUSED, CRITIC = "-", "!", "critic "
OVERRIDES = "--critic-overrides"


@dataclass(frozen=True)
class OlderFlag:
    """One row; ``value`` is None where it is about all values."""

    option: str
    value: str | None
    form: str
    now: str
    about: str

    @property
    def is_renamed(self) -> bool:
        """True if a flag of another name takes its values as they are."""
        return self.form == ""

    @property
    def target(self) -> str | None:
        """The first option that stands in its place."""
        words = self.now.removeprefix(CRITIC).split()
        return words[0] if words[0].startswith("--") else None

    def sentence(self) -> str:
        """The message for the user."""
        given = f"{self.option} {self.value}" if self.value else self.option
        if self.now == NOTHING:
            return f"{given} has no effect: {self.about}"
        if self.now == REFUSED:
            return f"{given} is not available: {self.about}"
        if self.now.startswith(CRITIC):
            return f"{given} gives the critic its {self.target}, as {OVERRIDES} does now"
        means = "is called" if self.is_renamed else "stands for"
        return f"{given} {means} {self.now} now" + (f": {self.about}" if self.about else "")


@dataclass
class Translation:
    """``words`` with current flags, what is said about the older ones, and why some are ``refused``."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@cache
def older_flags() -> dict[str, tuple[OlderFlag, ...]]:
    """Option -> its rows, in the order of the table."""
    found: dict[str, tuple[OlderFlag, ...]] = {}
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            name, form, now, about = line.split("\t")
            option, _, value = name.partition("=")
            found[option] = (*found.get(option, ()), OlderFlag(option, value or None, form, now, about))
    return found


def translate(words: Sequence[str], parser: ArgumentParser) -> Translation:
    """Put current flags in the place of older ones. Raises ``ArgumentError`` for a missing or an unknown value."""
    known = parser._option_string_actions
    done = Translation()
    critic: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, joined = word.partition("=")
        rows = _rows(name, parser)
        if not rows:
            done.words.append(word)
            continue
        values = [joined] if equals else []
        room = _room(rows[0], parser) - len(values)
        while room > 0 and left and not looks_like_flag(left[0], known):
            values.append(left.pop(0))
            room -= 1
        row = _row_for(rows, values)
        if row.now == REFUSED:
            done.refused.append(row.sentence())
            continue
        done.notes.append(row.sentence())
        if row.now.startswith(CRITIC):
            try:
                critic |= vars(parser.parse_known_args([str(row.target), *values])[0])
            except ArgumentError as error:
                raise ArgumentError(f"{row.option}: {error}") from error
        elif row.is_renamed:
            done.words += [f"{row.now}={joined}"] if equals else [row.now, *values]
        elif row.now != NOTHING:
            done.words += shlex.split(row.now)
    if critic:  # in front: what is given under the current name wins
        done.words[:0] = [f"{OVERRIDES}={json.dumps(critic)}"]
    return done


def translate_value(name: str, value: object, parser: ArgumentParser) -> tuple[dict[str, Any], str] | None:
    """The attributes that an entry ``name: value`` of a file sets now, and what is said about it.

    None where ``name`` is no older flag. Raises ``ArgumentError`` for a wrong value and for a flag that is refused.
    """
    option = "--" + name.lstrip("-").replace("_", "-")
    if not _rows(option, parser):
        return None
    if value is None or value is False:
        return {}, f"{option} is of an older release; leave it out"
    values = [] if value is True else value if isinstance(value, list) else [value]
    texts = [json.dumps(v) if isinstance(v, dict | list) else str(v) for v in values]
    done = translate([option, *texts], parser)
    if done.refused:
        raise ArgumentError("; ".join(done.refused))
    namespace, rest = parser.parse_known_args(done.words)
    if rest:
        raise ArgumentError(f"{option}: unexpected value {rest[0]!r}")
    return vars(namespace), "; ".join(done.notes)


def _rows(option: str, parser: ArgumentParser) -> tuple[OlderFlag, ...]:
    """The rows about ``option``, none where it is a current flag or the installed packages lack what it is now."""
    known = parser._option_string_actions
    rows = () if option in known else older_flags().get(option, ())
    return tuple(row for row in rows if row.target is None or row.target in known)


def _room(row: OlderFlag, parser: ArgumentParser) -> int:
    """Return how many values may follow, at most."""
    many = 1_000_000
    if not row.is_renamed:
        return {"switch": 0, "text": 1, "optional": 1, "texts": many}[row.form]
    taken = parser._option_string_actions[row.now].nargs
    return taken if isinstance(taken, int) else 1 if taken in (None, "?") else many


def _row_for(rows: Sequence[OlderFlag], values: Sequence[str]) -> OlderFlag:
    if rows[0].form in ("text", "texts") and not values:
        raise ArgumentError(f"{rows[0].option}: a value is missing after it")
    found = next((row for row in rows if row.value is None or row.value in values), None)
    if found is None:
        choices = ", ".join(str(row.value) for row in rows)
        raise ArgumentError(f"{rows[0].option}: expected one of {choices}, got {values[0]!r}")
    return found
