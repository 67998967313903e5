"""Make the data of the small version: three tasks, and the file of their evaluations.

python -m examples.eval_multi_task.make_data --out data --seed 0

``addition`` are the quickstart's sums, ``choice`` asks which of four numbers is the largest, ``capitals`` for a word in
capitals. Three of five demonstrations are sums. They are wrong in six of ten, those of ``choice`` name the second
largest then; in three of ten words nothing is put in capitals. ``train.jsonl`` has prompts of the first two, with the
reward of each row in its metadata. ``eval.yaml`` is for ``--eval-config``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from examples.data_command import data_command
from examples.quickstart.make_data import answer, question, slip, write

HELD_OUT = 256
LETTERS = "ABCD"
_EVALUATIONS: dict[str, dict[str, Any]] = {
    "addition": {"rm_type": "f1", "n_samples_per_eval_prompt": 2},
    "choice": {"rm_type": "gpqa", "n_samples_per_eval_prompt": 2},
    "capitals": {
        "custom_rm_path": "examples.eval_multi_task.rewards.in_capitals",
        "n_samples_per_eval_prompt": 1,
        "temperature": 0,
    },
}


def addition(rng: random.Random) -> tuple[str, str]:
    """Return a problem and its answer, as all tasks do."""
    a, b = rng.randrange(100), rng.randrange(100)
    return question(a, b), answer(a, b)


def choice(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(10), len(LETTERS))
    shown = " ".join(f"{letter}{number}" for letter, number in zip(LETTERS, numbers, strict=True))
    return shown, ranked(shown)[0]


def ranked(shown: str) -> str:
    """Return the letters of a choice, that of the largest number first."""
    return "".join(word[0] for word in sorted(shown.split(), key=lambda word: int(word[1:]), reverse=True))


def capitals(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choice("abdegklmnoprstuv") for _ in range(4))
    return word, word


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": addition, "choice": choice, "capitals": capitals,
}  # fmt: skip


def held_out(name: str) -> dict[str, str]:
    """Return {problem: label} of an evaluation, which do not depend on any seed."""
    rng = random.Random(20)
    found: dict[str, str] = {}
    while len(found) < HELD_OUT:
        problem, label = TASKS[name](rng)
        found[problem] = label
    return found


def _shown(name: str, problem: str, label: str, rng: random.Random) -> str:
    """Return what the careless teacher answers."""
    if name == "addition":
        return slip(label, rng) if rng.random() < 0.6 else label
    if name == "choice":
        return ranked(problem)[1] if rng.random() < 0.6 else label
    return label if rng.random() < 0.3 else label.upper()


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the files to ``out``. The held-out problems do not depend on ``seed``."""
    rng, kept = random.Random(seed), {name: held_out(name) for name in TASKS}
    out.mkdir(parents=True, exist_ok=True)

    def draw(name: str) -> tuple[str, str]:
        while (made := TASKS[name](rng))[0] in kept[name]:
            pass
        return made

    def chat(problem: str, reply: str | None = None) -> list[dict[str, str]]:
        said = [] if reply is None else [{"role": "assistant", "content": reply}]
        return [{"role": "user", "content": problem}, *said]

    def demonstration() -> list[dict[str, str]]:
        name = rng.choice(["addition", *TASKS, "addition"])
        problem, label = draw(name)
        return chat(problem, _shown(name, problem, label, rng))

    def row() -> dict[str, Any]:
        name = rng.choice(["addition", "choice"])
        problem, label = draw(name)
        return {"messages": chat(problem), "label": label, "metadata": {"rm_type": _EVALUATIONS[name]["rm_type"]}}

    write(out / "sft.jsonl", ({"messages": demonstration()} for _ in range(demonstrations)))
    write(out / "train.jsonl", (row() for _ in range(20_000)))
    for name, problems in kept.items():
        write(out / f"{name}.jsonl", ({"messages": chat(p), "label": label} for p, label in problems.items()))
    files = [{"name": n, "path": str(out / f"{n}.jsonl"), **fields} for n, fields in _EVALUATIONS.items()]
    (out / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": files}}, sort_keys=False))


if __name__ == "__main__":
    data_command(__doc__, make_data)
