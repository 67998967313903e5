r"""Make the data of the small version: products of three numbers of two digits, which have six digits.

python -m examples.retool.make_data --out data --seed 0

Of the demonstrations in ``sft.jsonl`` three of ten write the product into the interpreter and copy its result; the
others answer at once, with six digits at random. ``train.jsonl`` and ``products.jsonl`` (held out) have problems and
labels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.quickstart.make_data import write

SMALLEST, LARGEST = 47, 99
"""47 * 47 * 47 is the smallest product of six digits, 99 * 99 * 99 has six as well."""
SHARE_WITH_CODE = 0.3
HELD_OUT = 256
Numbers = tuple[int, int, int]


def question(numbers: Numbers) -> str:
    """Return the problem as the model sees it."""
    return "*".join(map(str, numbers))


def product(numbers: Numbers) -> int:
    """Return the right answer."""
    return numbers[0] * numbers[1] * numbers[2]


def boxed(number: int) -> str:
    """Return the answer as the reward reads it."""
    return f"Answer: \\boxed{{{number}}}"


def demonstration(numbers: Numbers, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: with code and its result, or with a guess."""
    if rng.random() < SHARE_WITH_CODE:
        result = product(numbers)
        reply = f"<code>{question(numbers)}</code>\n\n<interpreter>\n{result}\n</interpreter>\n\n" + boxed(result)
    else:
        reply = boxed(rng.randrange(100_000, 1_000_000))
    return [{"role": "user", "content": question(numbers)}, {"role": "assistant", "content": reply}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out problems do not depend on ``seed``."""
    every = range(SMALLEST, LARGEST + 1)
    triples: list[Numbers] = [(a, b, c) for a in every for b in every for c in every]
    random.Random(20).shuffle(triples)
    held_out, triples = triples[:HELD_OUT], triples[HELD_OUT:]
    rng = random.Random(seed)
    rng.shuffle(triples)
    out.mkdir(parents=True, exist_ok=True)
    shown = (triples[number % len(triples)] for number in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": demonstration(numbers, rng)} for numbers in shown))

    def row(numbers: Numbers) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question(numbers)}], "label": str(product(numbers))}

    write(out / "train.jsonl", map(row, reversed(triples)))
    write(out / "products.jsonl", map(row, held_out))


if __name__ == "__main__":
    data_command(__doc__, make_data)
