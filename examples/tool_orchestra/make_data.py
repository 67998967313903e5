"""Make the data of the small version: what is found in made-up places, for people who want it cheap or fast.

python -m examples.tool_orchestra.make_data --out data --seed 0

A problem is ``cheap hard bako``: what to save on, whether the cheap expert knows the answer (a third of the places is
easy), and the place. The demonstrations in ``sft.jsonl`` ask any expert, with some regard to what is asked for.
``cheap.jsonl`` and ``fast.jsonl`` (held out) have the same places; ``corpus.jsonl`` is that of search_r1.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.quickstart.make_data import write
from examples.search_r1.make_data import document, facts
from examples.tool_orchestra.expert_server import PRICING

HELD_OUT = 96
MODELS = {"answer-1": "cheap", "answer-2": "dear", "answer-3": "slow", "search-1": "cheap"}
PREFERENCES = {"cheap": {"accuracy": 1.0, "cost": 1.0}, "fast": {"accuracy": 1.0, "latency": 1.0}}
BUDGETS = {"cheap": {"cost": 2.0}, "fast": {"latency": 2.0}}
"""Of evaluations: enough for a search and the cheap expert, and for the dear one."""
SHOWN = {"cheap": [4, 1, 1, 3], "fast": [2, 4, 1, 2]}
"""Weights of ``MODELS`` in the calls of demonstrations; ``search-1`` where nothing is found yet."""


def problem(preference: str, place: str, number: int) -> str:
    """Return the problem as the orchestrator sees it; ``number`` is the place's in the list of facts."""
    return f"{preference} {'easy' if number % 3 == 0 else 'hard'} {place}"


def call(alias: str) -> str:
    """Return the orchestrator's call of a model."""
    return f"<tool_call>{json.dumps({'name': alias.partition('-')[0], 'arguments': {'model': alias}})}</tool_call>"


def demonstration(preference: str, number: int, place: str, thing: str, rng: random.Random) -> list[dict[str, str]]:
    """Return one turn of an orchestrator, without or with the document that a search has found."""
    asked, choice = problem(preference, place, number), dict(zip(MODELS, SHOWN[preference], strict=True))
    if rng.random() < 0.25:
        asked += f"\n\nDocuments:\n{document(place, thing)['contents']}"
        del choice["search-1"]
    said = call(*rng.choices([*choice], [*choice.values()]))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the five files to ``out``. Facts and held-out places do not depend on ``seed``."""
    known = facts()
    numbered = list(enumerate(known))
    held_out, rest = numbered[:HELD_OUT], numbered[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "corpus.jsonl", (document(place, thing) for place, thing in known.items()))

    def shown_to_the_model() -> list[dict[str, str]]:
        number, place = rng.choice(rest)
        return demonstration(rng.choice(list(PREFERENCES)), number, place, known[place], rng)

    write(out / "sft.jsonl", ({"messages": shown_to_the_model()} for _ in range(demonstrations)))

    def row(preference: str, number: int, place: str) -> dict[str, Any]:
        metadata = {"category": "qa", "model_mapping": MODELS, "tool_pricing": PRICING,
                    "pref_vec": PREFERENCES[preference], "budget": BUDGETS[preference]}  # fmt: skip
        asked = {"role": "user", "content": problem(preference, place, number)}
        return {"messages": [asked], "label": known[place], "metadata": metadata}

    every = [(preference, *one) for one in rest for preference in PREFERENCES]
    rng.shuffle(every)
    write(out / "train.jsonl", (row(*one) for one in every))
    for preference in PREFERENCES:
        write(out / f"{preference}.jsonl", (row(preference, *one) for one in held_out))


if __name__ == "__main__":
    data_command(__doc__, make_data)
