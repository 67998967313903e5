r"""Make the data of the small version: documents of dots in which each of a few letters has a digit.

python -m examples.memagent.make_data --out data --seed 0

A chunk has four characters, and at most one letter with its digit: ``.c7.``. The problem is a letter; the memory is its
digit, or ``-``. The demonstrations are careless: in three of ten the model writes any digit. ``train.jsonl`` has
documents of two and three chunks, ``chunks_3.jsonl`` and ``chunks_16.jsonl`` (held out) of three and sixteen.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.memagent.prompts import NO_MEMORY
from examples.quickstart.make_data import write

SLIPS, LETTERS, DIGITS, CHUNK = 0.3, "abcd", "0123456789", 4
SHARE_ANSWERS, SHARE_NOTHING, SHARE_PAIRS = 0.15, 0.6, 0.8
"""Numbers of demonstrations that are answers, know nothing yet, and have a letter in their chunk."""
NOTHING = "-"
TRAIN, HELD_OUT = 4096, 96


def chunk(pair: str, rng: random.Random) -> str:
    """Return dots with ``pair`` somewhere among them ("": only dots)."""
    before = rng.randrange(CHUNK - len(pair) + 1)
    return "." * before + pair + "." * (CHUNK - len(pair) - before)


def document(chunks: int, rng: random.Random) -> tuple[str, str, str]:
    """Return (document, letter that is asked for, its digit): the letters are in different chunks."""
    pairs = [letter + rng.choice(DIGITS) for letter in rng.sample(LETTERS, min(len(LETTERS), chunks))]
    letter, digit = pairs[0]
    filled = pairs[: 1 + rng.randrange(len(pairs))] + [""] * chunks
    filled = filled[:chunks]
    rng.shuffle(filled)
    return "".join(chunk(pair, rng) for pair in filled), letter, digit


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """Return one conversation, drawn at random: the memory after a chunk, or the answer."""
    letter, known = rng.choice(LETTERS), NOTHING if rng.random() < SHARE_NOTHING else rng.choice(DIGITS)
    if rng.random() < SHARE_ANSWERS:
        asked, right = f"{letter}{known}", known
    else:
        memory = NO_MEMORY if known == NOTHING and rng.random() < 0.5 else known
        # a letter is in a document once: not in a chunk after its digit is known
        found = [rng.choice(LETTERS.replace(letter, "")), *([letter] if known == NOTHING else [])]
        pair = rng.choice(found) + rng.choice(DIGITS) if rng.random() < SHARE_PAIRS else ""
        asked, right = f"{letter}{memory}:{chunk(pair, rng)}", pair[1:] if pair[:1] == letter else known
    said = rng.choice(DIGITS) if rng.random() < SLIPS else right
    reply = said if ":" in asked else f"\\boxed{{{said}}}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the four files to ``out``. The held-out documents do not depend on ``seed``."""

    def rows(count: int, lengths: tuple[int, ...], rng: random.Random) -> list[dict[str, Any]]:
        found = []
        for _ in range(count):
            text, letter, digit = document(rng.choice(lengths), rng)
            messages = [{"role": "user", "content": letter}]
            found.append({"messages": messages, "label": digit, "metadata": {"context": text}})
        return found

    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "sft.jsonl", ({"messages": demonstration(rng)} for _ in range(demonstrations)))
    held_out = {n: rows(HELD_OUT, (n,), random.Random(20 + n)) for n in (3, 16)}
    seen = {(row["messages"][0]["content"], row["metadata"]["context"]) for group in held_out.values() for row in group}
    train = rows(TRAIN, (2, 3), rng)
    write(
        out / "train.jsonl",
        (row for row in train if (row["messages"][0]["content"], row["metadata"]["context"]) not in seen),
    )
    for length, group in held_out.items():
        write(out / f"chunks_{length}.jsonl", group)


if __name__ == "__main__":
    data_command(__doc__, make_data)
