"""Make the data of the small version: the products of retool, and agents' chats about them.

python -m examples.strands_sglang.make_data --out data --seed 0

Of the demonstrations in ``sft.jsonl`` three of ten call the interpreter and copy its result; the others guess.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.data_command import data_command
from examples.quickstart.make_data import write
from examples.retool import make_data as products
from examples.retool.make_data import SHARE_WITH_CODE, Numbers, boxed, product, question


def call(code: str) -> str:
    """Return a call of the interpreter."""
    return f"<tool_call>{json.dumps({'name': 'code_interpreter', 'arguments': {'code': code}})}</tool_call>"


def demonstration(numbers: Numbers, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat: with a call and its result, or with a guess."""
    chat = [{"role": "user", "content": question(numbers)}]
    if rng.random() >= SHARE_WITH_CODE:
        return [*chat, {"role": "assistant", "content": boxed(rng.randrange(100_000, 1_000_000))}]
    result = product(numbers)
    return [
        *chat,
        {"role": "assistant", "content": call(question(numbers))},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": boxed(result)},
    ]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out problems do not depend on ``seed``."""
    products.make_data(out, seed=seed, demonstrations=demonstrations)
    rng = random.Random(seed)
    chats = []
    with (out / "sft.jsonl").open() as lines:
        for line in lines:
            a, b, c = json.loads(line)["messages"][0]["content"].split("*")
            chats.append({"messages": demonstration((int(a), int(b), int(c)), rng)})
    write(out / "sft.jsonl", chats)


if __name__ == "__main__":
    data_command(__doc__, make_data)
