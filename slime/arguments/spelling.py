"""Guess what a user most likely meant by a word that is no known flag."""

from __future__ import annotations

import difflib
import re
from argparse import Action
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

# Dashes that word processors and web pages make of "--": hyphens, en and em dash, minus sign.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_PREFIXES = ("rollout-", "sglang-", "router-")

OTHER_NAMES = Path(__file__).with_name("other_names.tsv")


@cache
def other_names() -> dict[str, str]:
    """Return what users of other trainers write -> the flag, or words about it. Names with a dot are paths of Hydra."""
    lines = OTHER_NAMES.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if not line.startswith("#"))


def hydra_settings() -> dict[str, str]:
    """The end of a path of Hydra -> the flag, or words about it."""
    return {name: meant for name, meant in other_names().items() if "." in name}


def hydra_message(word: str) -> str | None:
    """Return what to write in place of ``path.to.key=value`` of Hydra, with or without dashes; None for other words."""
    found = re.fullmatch(r"(?:--|[+~]{1,2})?([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)+)(?:=(.*))?", word, re.DOTALL)
    if found is None or ("=" not in word and not word.startswith("--")):
        return None
    path, value = found[1].replace("-", "_"), found[2]
    flag = next((flag for key, flag in hydra_settings().items() if path == key or path.endswith(f".{key}")), None)
    if flag is None:
        last = path.rpartition(".")[2].replace("_", "-")
        return f"{word} is a setting of Hydra; flags are written --flag value (`--help {last}` lists what mentions it)"
    if not flag.startswith("--"):
        return f"{word} is a setting of Hydra; here it is {flag}"
    is_switch = value in ("True", "true", "False", "false")
    return f"{word} is a setting of Hydra; here it is {flag}" + (f" {value}" if value and not is_switch else "")


def looks_like_flag(word: str, known: Collection[str]) -> bool:
    """Return True if ``word`` was meant as a flag: by its hyphens, or by other dashes before a ``known`` option."""
    if " " in word:
        return False
    foreign = re.match(rf"[-{_DASHES}]{{1,3}}(?=[A-Za-z])", word)
    return bool(re.match(r"-{1,2}[A-Za-z]", word)) or (foreign is not None and _with_hyphens(word) in known)


def dashes_are_foreign(name: str) -> bool:
    """Return True if ``name`` begins with dashes of a text instead of hyphens."""
    return any(character in _DASHES for character in name[:3])


def _with_hyphens(word: str) -> str:
    return "--" + word.lstrip("-" + _DASHES).split("=", 1)[0].replace("_", "-")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known option a user most likely meant, or None."""
    stem = _with_hyphens(name)[2:]
    exact = {k.lstrip("-"): k for k in known}
    if stem in exact:
        return exact[stem]
    meant = other_names().get(stem)
    if meant is not None and meant.split()[0] in known:
        return meant
    for candidate in (*(prefix + stem for prefix in _PREFIXES), stem.removeprefix("no-"), "no-" + stem):
        if candidate in exact:
            return exact[candidate]
    matches = difflib.get_close_matches(stem, list(exact), n=5, cutoff=0.72)
    near = next((match for match in matches if _is_slip(stem, match)), None)
    return None if near is None else exact[near]


def _is_slip(stem: str, known: str) -> bool:
    """Return True if ``stem`` is ``known`` with slips: words that are misspelled, or left out behind the first.

    A first word more or less is another thing: ``lora-rank`` is not ``q-lora-rank``, and ``actor-lr`` is not ``lr``.
    """
    words, others = stem.split("-"), known.split("-")
    if stem.replace("-", "") == known.replace("-", ""):
        return True
    if len(words) == len(others):
        return all(_misspelled(*pair) for pair in zip(words, others, strict=True))
    return _misspelled(words[0], others[0])


def _misspelled(one: str, other: str) -> bool:
    """Return True if at most a third of the letters were added, left out, exchanged or swapped with their neighbor."""
    return _edits(one, other) <= max(1, max(len(one), len(other)) // 3)


def _edits(one: str, other: str) -> int:
    """The edit distance with swaps of neighbors (optimal string alignment)."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (other[j - 2], one[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def stray_message(word: str, words: Sequence[str], known: Mapping[str, Action]) -> str:
    """Why ``word``, which belongs to no flag, is out of place in ``words``."""
    if f"--{word}" in known or word == "help":
        return f"unexpected word {word!r}; did you mean --{word}?"
    place = list(words).index(word) if word in words else -1
    before = next((w for w in reversed(words[: max(place, 0)]) if w in known), None)
    if before is None:
        return f"unexpected word {word!r}: every value belongs to a flag"
    if known[before].nargs == 0:
        return f"unexpected word {word!r} after {before}: it is a switch and takes no value"
    return f"unexpected word {word!r}: {before} takes one value; quote a value that contains spaces"


def parser_message(message: str) -> str:
    """An error of argparse in our words."""
    message = re.sub(r"^argument (--\S+?)(?:/--\S+)*: ", r"\1: ", message)
    option, _, reason = message.partition(": ")
    if reason in ("expected one argument", "expected at least one argument"):
        return f"{option}: a value is missing after it; one that begins with a dash is written {option}=VALUE"
    if match := re.fullmatch(r"ignored explicit argument (.*)", reason):
        return f"{option} is a switch and takes no value, got {match[1]}"
    return message
