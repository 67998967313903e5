"""Make the data of the small version: the made-up places of search_r1, and agents' chats about them.

python -m examples.openai_agents.make_data --out data --seed 0

Of the demonstrations in ``sft.jsonl`` three of ten call the tool and copy what it found; the others guess. The other
files are those of search_r1.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.data_command import data_command
from examples.quickstart.make_data import write
from examples.search_r1 import make_data as places
from examples.search_r1.make_data import HELD_OUT, SHARE_WITH_SEARCH, facts


def call(place: str) -> str:
    """Return a call of the tool as the tiny model's chat template writes it."""
    return f"<tool_call><function=search><parameter=query>{place}</parameter></function></tool_call>"


def demonstration(place: str, thing: str, things: list[str], rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: with a call and its result, or with a guess."""
    chat = [{"role": "user", "content": place}]
    if rng.random() >= SHARE_WITH_SEARCH:
        return [*chat, {"role": "assistant", "content": rng.choice(things)}]
    result = {"role": "tool", "content": f"{place} has {thing}"}
    return [*chat, {"role": "assistant", "content": call(place)}, result, {"role": "assistant", "content": thing}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the four files to ``out``. Facts and held-out questions do not depend on ``seed``."""
    places.make_data(out, seed=seed, demonstrations=0)
    known = facts()
    things, asked = sorted(set(known.values())), list(known)[HELD_OUT:]
    rng = random.Random(seed)
    shown = (rng.choice(asked) for _ in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": demonstration(p, known[p], things, rng)} for p in shown))


if __name__ == "__main__":
    data_command(__doc__, make_data)
