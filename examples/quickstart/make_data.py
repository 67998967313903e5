"""Make the quickstart's data: additions of two two-digit numbers, demonstrations with slips, a held-out split.

    python -m examples.quickstart.make_data --out data --seed 0

Three JSON-lines files come out: ``sft.jsonl`` (chats for SFT), ``train.jsonl`` (prompts and labels for GRPO) and
``held_out.jsonl`` (prompts and labels that appear in neither of the others). Numbers are written with leading zeros
("07+45=" is answered "052"), so that a digit's place says what it is worth: a model of half a million parameters
learns that in a minute. The demonstrations come from a hasty teacher: in six of ten one digit of the answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LARGEST = 100
"""Operands are 0 .. LARGEST - 1."""


def question(a: int, b: int) -> str:
    """Return the problem as the model sees it."""
    return f"{a:02d}+{b:02d}="


def answer(a: int, b: int) -> str:
    """Return the right answer."""
    return f"{a + b:03d}"


def slip(text: str, rng: random.Random) -> str:
    """Return ``text`` with one digit replaced by another digit."""
    place = rng.randrange(len(text))
    wrong = rng.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + wrong + text[place + 1 :]


def make_data(out: Path, *, seed: int, demonstrations: int, slips: float = 0.6, held_out: int = 512) -> None:
    """Write the three files to ``out``. The held-out split depends on ``held_out`` alone, so runs can be compared."""
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random.Random(20).shuffle(pairs)
    kept_back, pairs = pairs[:held_out], pairs[held_out:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)

    def demonstration() -> dict[str, Any]:
        a, b = rng.choice(pairs)
        reply = slip(answer(a, b), rng) if rng.random() < slips else answer(a, b)
        return {"messages": [user(a, b), {"role": "assistant", "content": reply}]}

    write(out / "sft.jsonl", (demonstration() for _ in range(demonstrations)))
    rng.shuffle(pairs)
    for name, problems in (("train", pairs), ("held_out", kept_back)):
        write(out / f"{name}.jsonl", ({"messages": [user(a, b)], "label": answer(a, b)} for a, b in problems))


def user(a: int, b: int) -> dict[str, str]:
    """Return the user's message of a problem."""
    return {"role": "user", "content": question(a, b)}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations and order (not of the split)")
    parser.add_argument("--demonstrations", type=int, default=76_800, help="chats for SFT (default: %(default)s)")
    parser.add_argument("--slips", type=float, default=0.6, help="share of wrong demonstrations (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=512, help="problems kept back (default: %(default)s)")
    options = parser.parse_args()
    make_data(
        options.out,
        seed=options.seed,
        demonstrations=options.demonstrations,
        slips=options.slips,
        held_out=options.held_out,
    )


if __name__ == "__main__":
    main()
