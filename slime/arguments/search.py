"""Which flags a user means by a word: a flag's name, a group, a word of a name or of a description."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from slime.arguments.flag import Flag

MOST_RELATED = 8
_SHARED_WORDS = 2.0


@dataclass(frozen=True)
class Found:
    """What was found: one ``flag``; or whole ``groups``, flags ``named`` so and flags that only ``mention`` it."""

    flag: Flag | None = None
    groups: tuple[str, ...] = ()
    named: tuple[Flag, ...] = ()
    mentioning: tuple[Flag, ...] = ()


def find(flags: Sequence[Flag], topic: str) -> Found:
    """Search ``flags`` for ``topic``: with dashes in front the flag of that name, else words that all must match.

    A word matches where a word starts with it; only when nothing is found that way, anywhere.
    """
    exact = option_of(flags, topic)
    if exact is not None:
        return Found(flag=exact)
    words = [re.escape(word) for word in _normal(topic).split()]
    return _matching(flags, [rf"\b{word}" for word in words]) or _matching(flags, words) or Found()


def option_of(flags: Sequence[Flag], topic: str) -> Flag | None:
    """The flag with the spelling ``topic``; dashes and underscores are the same, and without dashes it must have two
    words, so that ``--help rollout`` and ``--help seed`` are searches."""
    stem = _normal(topic)
    if not topic.startswith("-") and "-" not in stem:
        return None
    return next((flag for flag in flags for option in flag.options if _normal(option) == stem), None)


def nearest(flags: Sequence[Flag], topic: str, most: int = 5) -> list[str]:
    """Spellings of flags, and titles of groups, that look like ``topic``."""
    stem = _normal(topic)
    names = {_normal(option): option for flag in flags for option in flag.options}
    names |= {_normal(flag.group): flag.group for flag in flags}
    by_word: dict[str, str] = {}
    for name, shown in names.items():
        for word in name.split("-"):
            by_word.setdefault(word, shown)
    close = [names[name] for name in difflib.get_close_matches(stem, list(names), n=most, cutoff=0.6)]
    close += [by_word[word] for word in difflib.get_close_matches(stem, list(by_word), n=most, cutoff=0.75)]
    return list(dict.fromkeys(close))[:most]


def related(flags: Sequence[Flag], flag: Flag) -> list[Flag]:
    """Flags that ``flag`` mentions or that mention it, and then flags of its source with rare words of its name."""
    others = [other for other in flags if other is not flag]
    tied = [other for other in others if _mentions(flag, other) or _mentions(other, flag)]
    commonness = Counter(word for other in flags for word in _words(other))
    rarity = {word: log(len(flags) / commonness[word]) for word in _words(flag)}
    enough = _SHARED_WORDS * max(rarity.values()) / max(len(rarity), 1)

    def likeness(other: Flag) -> float:
        shared = set(rarity) & _words(other)
        return sum(rarity[word] for word in shared) if len(shared) > 1 or len(rarity) == 1 else 0.0

    alike = sorted((o for o in others if o.source == flag.source and o not in tied), key=likeness, reverse=True)
    return [*tied, *(other for other in alike if likeness(other) >= enough)][:MOST_RELATED]


def _matching(flags: Sequence[Flag], patterns: list[str]) -> Found | None:
    def matches(text: str) -> bool:
        return all(re.search(pattern, text) for pattern in patterns)

    groups = tuple(title for title in dict.fromkeys(f.group for f in flags) if matches(_normal(title, " ")))
    rest = [flag for flag in flags if flag.group not in groups]
    named = tuple(flag for flag in rest if matches(" ".join(map(_normal, (*flag.options, flag.dest)))))
    mentioning = tuple(flag for flag in rest if flag not in named and matches(_searched(flag)))
    return Found(groups=groups, named=named, mentioning=mentioning) if groups or named or mentioning else None


def _searched(flag: Flag) -> str:
    return _normal(" ".join((*flag.options, flag.dest, flag.help, flag.group, flag.source)), " ")


def _normal(text: str, joint: str = "-") -> str:
    text = text.lower().lstrip("-").replace("_", "-")
    return text if joint == "-" else text.replace("-", joint) + " " + text


def _words(flag: Flag) -> set[str]:
    return set(_normal(flag.option).split("-"))


def _mentions(flag: Flag, other: Flag) -> bool:
    return any(
        option in flag.help and re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", flag.help)
        for option in other.options
    )
