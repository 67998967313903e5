"""Make the data of the small version: demonstrations of the format, and the tasks of the evaluations.

python -m examples.adaptive_environments.make_data --out data --seed 0

``sft.jsonl`` has the sums of the quickstart's hasty teacher, six of ten of them wrong, and hunts in which three of
four guesses heed the hints. ``addition.jsonl`` has held-out sums, ``hunt.jsonl`` every number of the largest hunt. The
tasks of training are made up by the environments.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.adaptive_environments.environments import held_out_sums, hunt_size
from examples.data_command import data_command
from examples.quickstart.make_data import LARGEST, answer, slip, user, write

SLIPS, SHARE_HEEDING = 0.6, 0.75
HARDEST = 2


def sum_shown(rng: random.Random, held_out: set[tuple[int, int]]) -> list[dict[str, str]]:
    """Return the demonstration of a sum that is not held out."""
    pair = rng.randrange(LARGEST), rng.randrange(LARGEST)
    while pair in held_out:
        pair = rng.randrange(LARGEST), rng.randrange(LARGEST)
    reply = slip(answer(*pair), rng) if rng.random() < SLIPS else answer(*pair)
    return [user(*pair), {"role": "assistant", "content": reply}]


def hunt_shown(rng: random.Random) -> list[dict[str, str]]:
    """Return the demonstration of a hunt, whose guesses are drawn from all numbers or from those that may be it."""
    size, guesses = hunt_size(rng.randrange(HARDEST + 1))
    number = rng.randint(1, size)
    messages, least, most = [{"role": "user", "content": f"01..{size:02d}"}], 1, size
    for _ in range(guesses):
        guess = rng.randint(least, most) if rng.random() < SHARE_HEEDING else rng.randint(1, size)
        messages.append({"role": "assistant", "content": f"{guess:02d}"})
        if guess == number:
            break
        messages.append({"role": "user", "content": "+" if guess < number else "-"})
        least, most = (max(least, guess + 1), most) if guess < number else (least, min(most, guess - 1))
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. Only the demonstrations depend on ``seed``."""
    rng, held_out = random.Random(seed), set(held_out_sums())
    out.mkdir(parents=True, exist_ok=True)
    shown = (sum_shown(rng, held_out) if number % 2 else hunt_shown(rng) for number in range(demonstrations))
    write(out / "sft.jsonl", ({"messages": messages} for messages in shown))

    def task(name: str, prompt: dict[str, str], **fields: Any) -> dict[str, Any]:
        return {"messages": [prompt], "metadata": {"environment": name, "difficulty": HARDEST, **fields}}

    write(out / "addition.jsonl", (task("addition", user(*pair), numbers=pair) for pair in held_out_sums()))
    size = hunt_size(HARDEST)[0]
    prompt = {"role": "user", "content": f"01..{size:02d}"}
    write(out / "hunt.jsonl", (task("hunt", prompt, number=number) for number in range(1, size + 1) for _ in range(8)))


if __name__ == "__main__":
    data_command(__doc__, make_data)
