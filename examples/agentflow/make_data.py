"""Make the data of the small version: queries about people who have a friend and a value.

python -m examples.agentflow.make_data --out data --seed 0

The demonstrations are turns of a planner that knows the format and is hasty: more often than the right tool it takes
the one of the step after. ``train.jsonl`` and ``queries.jsonl`` (held out) have queries and labels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from examples.agentflow.small_world import KINDS, PEOPLE, answer_to, plan_for
from examples.data_command import data_command
from examples.quickstart.make_data import write

TOOLS = ("value", "friend", "next")
SHARE_RIGHT, SHARE_HASTY, HELD_OUT = 0.25, 0.55, 128
"""The other turns take any tool, as do hasty ones where no step comes after."""


def demonstration(query: str, rng: random.Random) -> list[dict[str, str]]:
    """Return one turn, after any number of right steps."""
    plan, latest, steps = plan_for(query), query.split()[-1], []
    position = rng.randrange(len(plan))
    for tool in plan[:position]:
        latest = answer_to(f"{tool} {latest}")
        steps.append(f"{tool}={latest}")
    draw, after = rng.random(), plan[position + 1 : position + 2]
    if draw < SHARE_RIGHT:
        tool = plan[position]
    elif draw < SHARE_RIGHT + SHARE_HASTY and after:
        [tool] = after
    else:
        tool = rng.choice(TOOLS)
    asked = "\n".join([query, *steps]) if steps else f"{query}\n"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": f"Tool Name: {tool}"}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out queries do not depend on ``seed``."""
    queries = [f"{kind} {name}" for kind in KINDS for name in PEOPLE]
    random.Random(20).shuffle(queries)
    held_out, queries = queries[:HELD_OUT], queries[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "sft.jsonl", ({"messages": demonstration(rng.choice(queries), rng)} for _ in range(demonstrations)))
    rng.shuffle(queries)

    def row(query: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": query}], "label": answer_to(query)}

    write(out / "train.jsonl", map(row, queries))
    write(out / "queries.jsonl", map(row, held_out))


if __name__ == "__main__":
    data_command(__doc__, make_data)
