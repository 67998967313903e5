"""Make the data of the small version: customers who want an order in another color.

python -m examples.tau_bench.make_data --out data --seed 0

Of the demonstrations in ``sft.jsonl`` one of four keeps the policy: it looks the order up, asks for the color where
that is needed, and does what the status demands. The others do one of the four things at once. ``train.jsonl`` has
tasks of both kinds. Held out are ``orders.jsonl``, where customers say the color, and ``questions.jsonl``, where they
do not.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.quickstart.make_data import write
from examples.tau_bench.shop import COLORS, ORDERS, STATUSES, right_turn

HELD_OUT = 32
"""Pairs of an order and a color."""
SHARE_CAREFUL = 0.25
Wish = tuple[str, str, str, bool]
"""Order, color, status, and whether the customer tells the color."""


def opening(wish: Wish) -> dict[str, str]:
    """Return the customer's first message."""
    order, color, _, tells = wish
    return {"role": "user", "content": f"{order} {color}" if tells else order}


def demonstration(wish: Wish, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: by the policy, or in haste."""
    order, color, status, tells = wish
    if rng.random() >= SHARE_CAREFUL:
        guess = color if tells else rng.choice(COLORS)
        return [opening(wish), {"role": "assistant", "content": right_turn(rng.choice(STATUSES), order, guess)}]
    chat = [opening(wish), {"role": "assistant", "content": f"get {order}"}, {"role": "tool", "content": status}]
    if status == "new" and not tells:
        chat += [{"role": "assistant", "content": "color?"}, {"role": "user", "content": color}]
    return [*chat, {"role": "assistant", "content": right_turn(status, order, color)}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the four files to ``out``. The held-out tasks do not depend on ``seed``."""
    pairs = list(itertools.product(ORDERS, COLORS))
    random.Random(20).shuffle(pairs)
    held_out, pairs = pairs[:HELD_OUT], pairs[HELD_OUT:]
    rng = random.Random(seed)
    wishes: list[Wish] = [(*pair, status, tells) for pair in pairs for status in STATUSES for tells in (True, False)]
    rng.shuffle(wishes)
    out.mkdir(parents=True, exist_ok=True)
    shown = (wishes[number % len(wishes)] for number in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": demonstration(wish, rng)} for wish in shown))

    def row(wish: Wish) -> dict[str, Any]:
        about = dict(zip(("order", "color", "status", "tells"), wish, strict=True))
        return {"messages": [opening(wish)], "metadata": about}

    write(out / "train.jsonl", map(row, reversed(wishes)))
    for name, tells in (("orders", True), ("questions", False)):
        write(out / f"{name}.jsonl", (row((*pair, status, tells)) for pair in held_out for status in STATUSES))


if __name__ == "__main__":
    data_command(__doc__, make_data)
