"""Make the data of the small version: the quickstart's sums, and demonstrations of what each agent writes.

python -m examples.multi_agent.make_data --out data --seed 0

All demonstrations are careless: solvers are wrong in six of ten, rewriters copy any of two such answers, selectors pick
any. ``train.jsonl`` and ``sums.jsonl`` (held out) have problems and labels.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.data_command import data_command
from examples.quickstart.make_data import LARGEST, answer, question, slip, user, write

SLIPS, HELD_OUT, CANDIDATES = 0.6, 256, 2


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat of one agent, drawn at random."""

    def careless() -> str:
        return slip(answer(a, b), rng) if rng.random() < SLIPS else answer(a, b)

    seen = [careless() for _ in range(CANDIDATES)]
    asked, reply = {
        "solver": (question(a, b), seen[0]),
        "rewriter": ("\n".join([question(a, b), *seen]), rng.choice(seen)),
        "selector": ("\n".join([f"{question(a, b)}?", *seen]), f"Judgment: {rng.randint(1, CANDIDATES)}"),
    }[rng.choice(["solver", "rewriter", "selector"])]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out sums do not depend on ``seed``."""
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random.Random(20).shuffle(pairs)
    held_out, pairs = pairs[:HELD_OUT], pairs[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    shown = (demonstration(*rng.choice(pairs), rng) for _ in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": messages} for messages in shown))
    rng.shuffle(pairs)
    for name, problems in (("train", pairs), ("sums", held_out)):
        write(out / f"{name}.jsonl", ({"messages": [user(a, b)], "label": answer(a, b)} for a, b in problems))


if __name__ == "__main__":
    data_command(__doc__, make_data)
