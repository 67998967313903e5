"""Make the data of the small version: repositories of two files, of which one has a wrong operator.

python -m examples.coding_agent_rl.make_data --out data --seed 0

A statement says what is wrong, ``not 12-5``; only ``check.py`` says what is right, ``12+5``. In two of ten
demonstrations the agent reads the test and repairs the function; in the others it is hasty and mostly writes what is
there. ``train.jsonl`` and ``tasks.jsonl`` (held out) have the tasks.
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

SHARE_READING, SHARE_UNCHANGED, HELD_OUT = 0.2, 0.6, 64
"""Of hasty demonstrations 0.6 name the operator that is there, the others any."""
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod,
}  # fmt: skip
READ = "?"
"""The text that the model writes to have the agent read the test."""
Task = tuple[int, int, str]


def tasks() -> list[Task]:
    """Return every task with one right operator, in an order that does not depend on any seed."""
    found = []
    for a in range(10, 100):
        for b in range(3, 10):
            values = {name: fn(a, b) for name, fn in OPERATORS.items()}
            found += [(a, b, name) for name, value in values.items() if list(values.values()).count(value) == 1]
    random.Random(20).shuffle(found)
    return found


def statement(a: int, b: int, broken: str) -> str:
    """Return the problem as the agent sees it first."""
    return f"not {a}{broken}{b}"


def as_read(a: int, b: int, name: str) -> str:
    """Return what the agent sees of ``check.py``."""
    return f"{a}{name}{b}"


def wrong(name: str, rng: random.Random) -> str:
    """Return another operator."""
    return rng.choice([other for other in OPERATORS if other != name])


def metadata(a: int, b: int, name: str, broken: str) -> dict[str, Any]:
    """Return the fields of a task, of which ``pre_commands`` make the repository."""
    files = {
        "calc.py": f"def f(a, b):\n    return a {broken} b\n",
        "check.py": f"from calc import f\n\nassert f({a}, {b}) == {a} {name} {b}\n",
    }
    written = " && ".join(f"printf %s {shlex.quote(text)} > {file}" for file, text in files.items())
    who = "-c user.name=slime -c user.email=slime@example.org"
    git = f"git init -q --template= && git add . && git {who} commit -qm start"
    return {
        "image": "local", "workdir": "/workspace/repo", "instance_id": f"{a}{name}{b}",
        "problem_statement": statement(a, b, broken), "eval_cmd": "python3 -B check.py",
        "pre_commands": [f"mkdir -p /workspace/repo && cd /workspace/repo && {written} && {git}"],
    }  # fmt: skip


def make_data(out: Path, *, seed: int, demonstrations: int) -> None:
    """Write the three files to ``out``. The held-out tasks do not depend on ``seed``."""
    every = tasks()
    held_out, rest = every[:HELD_OUT], every[HELD_OUT:]
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)

    def chat(task: Task, broken: str, *said: str) -> list[dict[str, str]]:
        """``said`` are what the agent, then the user, then the agent says."""
        roles = ("user", "assistant", "user", "assistant")
        return [
            {"role": role, "content": text}
            for role, text in zip(roles, (statement(*task[:2], broken), *said), strict=False)
        ]

    def demonstration() -> list[dict[str, str]]:
        task = rng.choice(rest)
        broken = wrong(task[2], rng)
        if rng.random() < SHARE_READING:
            return chat(task, broken, READ, as_read(*task), task[2])
        return chat(task, broken, broken if rng.random() < SHARE_UNCHANGED else rng.choice([*OPERATORS]))

    def row(task: Task) -> dict[str, Any]:
        broken = wrong(task[2], rng)
        return {"messages": chat(task, broken), "metadata": metadata(*task, broken)}

    write(out / "sft.jsonl", ({"messages": demonstration()} for _ in range(demonstrations)))
    rng.shuffle(rest)
    for file, chosen in (("train", rest), ("tasks", held_out)):
        write(out / f"{file}.jsonl", map(row, chosen))


if __name__ == "__main__":
    data_command(__doc__, make_data)
