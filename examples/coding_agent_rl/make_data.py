"""Make the data of the small version: repositories of two files, of which one has a wrong operator.

python -m examples.coding_agent_rl.make_data --out data --seed 0

A statement says what the function must return, ``12,5=17``; ``check.py`` tests that. Demonstrations name a wrong
operator in six of ten. ``train.jsonl`` and ``tasks.jsonl`` (held out) have the tasks.
"""

from __future__ import annotations

import operator
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.data_command import data_command
from examples.quickstart.make_data import write

SLIPS, HELD_OUT = 0.6, 32
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod,
}  # fmt: skip
Task = tuple[int, int, str]


def tasks() -> list[Task]:
    """Return every task with one right operator, in an order that does not depend on any seed."""
    found = []
    for a in range(10, 40):
        for b in range(3, 10):
            values = {name: fn(a, b) for name, fn in OPERATORS.items()}
            found += [(a, b, name) for name, value in values.items() if list(values.values()).count(value) == 1]
    random.Random(20).shuffle(found)
    return found


def statement(a: int, b: int, name: str) -> str:
    """Return the problem as the agent sees it."""
    return f"{a},{b}={OPERATORS[name](a, b)}"


def wrong(name: str, rng: random.Random) -> str:
    """Return another operator."""
    return rng.choice([other for other in OPERATORS if other != name])


def metadata(a: int, b: int, name: str, broken: str) -> dict[str, Any]:
    """Return the fields of a task, of which ``pre_commands`` make the repository."""
    files = {
        "calc.py": f"def f(a, b):\n    return a {broken} b\n",
        "check.py": f"from calc import f\n\nassert f({a}, {b}) == {OPERATORS[name](a, b)}\n",
    }
    written = " && ".join(f"printf %s {shlex.quote(text)} > {file}" for file, text in files.items())
    git = "git init -q && git add . && git -c user.name=slime -c user.email=slime@example.org commit -qm start"
    return {
        "image": "local", "workdir": "/workspace/repo", "instance_id": f"{a}{name}{b}",
        "problem_statement": statement(a, b, name), "eval_cmd": "python3 -B check.py",
        "pre_commands": [f"mkdir -p /workspace/repo && cd /workspace/repo && {written} && {git}"],
    }  # fmt: skip


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out tasks do not depend on ``seed``."""
    every = tasks()
    held_out, rest = every[:HELD_OUT], every[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)

    def asked(task: Task) -> dict[str, str]:
        return {"role": "user", "content": statement(*task)}

    def demonstration() -> list[dict[str, str]]:
        task = rng.choice(rest)
        said = wrong(task[2], rng) if rng.random() < SLIPS else task[2]
        return [asked(task), {"role": "assistant", "content": said}]

    write(out / "sft.jsonl", ({"messages": demonstration()} for _ in range(demonstrations)))
    rng.shuffle(rest)
    for file, chosen in (("train", rest), ("tasks", held_out)):
        rows = ({"messages": [asked(task)], "metadata": metadata(*task, wrong(task[2], rng))} for task in chosen)
        write(out / f"{file}.jsonl", rows)


if __name__ == "__main__":
    data_command(__doc__, make_data)
