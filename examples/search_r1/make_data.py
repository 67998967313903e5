"""Make the data of the small version: made-up places and what is found there, one of 64 things.

python -m examples.search_r1.make_data --out data --seed 0

``corpus.jsonl`` has a fact of each of 2000 places. Of the demonstrations in ``sft.jsonl`` three of ten search and copy
the answer; the others guess. ``train.jsonl`` and ``facts.jsonl`` (held out) have questions and labels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.quickstart.make_data import write
from examples.search_r1.environment import shown

PLACES, HELD_OUT = 2000, 256
SHARE_WITH_SEARCH = 0.3
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def facts() -> dict[str, str]:
    """Return {place: thing}, which do not depend on any seed: places have four letters, things three."""
    rng = random.Random(20)
    things = sorted({_word(rng, 3) for _ in range(500)})[:64]
    found: dict[str, str] = {}
    while len(found) < PLACES:
        found.setdefault(_word(rng, 4), rng.choice(things))
    return found


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(_VOWELS if place % 2 else _CONSONANTS) for place in range(length))


def document(place: str, thing: str) -> dict[str, str]:
    """Return a fact as the retrieval server has it."""
    return {"id": place, "contents": f'"{place}"\n{place} has {thing}'}


def demonstration(place: str, thing: str, things: list[str], rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: with a search and its result, or with a guess."""
    if rng.random() < SHARE_WITH_SEARCH:
        information = f"\n\n<information>{shown([document(place, thing)])}</information>\n\n"
        reply = f"<search>{place}</search>{information}<answer>{thing}</answer>"
    else:
        reply = f"<answer>{rng.choice(things)}</answer>"
    return [{"role": "user", "content": place}, {"role": "assistant", "content": reply}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the four files to ``out``. Facts and held-out questions do not depend on ``seed``."""
    known = facts()
    things = sorted(set(known.values()))
    places = list(known)
    held_out, rest = places[:HELD_OUT], places[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "corpus.jsonl", (document(place, thing) for place, thing in known.items()))
    asked = (rng.choice(rest) for _ in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": demonstration(p, known[p], things, rng)} for p in asked))
    rng.shuffle(rest)

    def row(place: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": place}], "label": known[place]}

    write(out / "train.jsonl", map(row, rest))
    write(out / "facts.jsonl", map(row, held_out))


if __name__ == "__main__":
    data_command(__doc__, make_data)
