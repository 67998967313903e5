"""A plain model of the journal, and random histories that are cut or damaged at a random byte."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.durable.recovery import GroupJournal
from slime.utils.types import Sample

Step = tuple[Any, ...]
SETTING = {"rollout_temperature": 1.0, "prompt_data": "p.jsonl"}
PENDING, ABORTED, COMPLETED = Sample.Status.PENDING, Sample.Status.ABORTED, Sample.Status.COMPLETED


def make_group(number: int, tokens: list[int], status: Sample.Status) -> list[Sample]:
    """Return the two samples of group ``number``, each with ``tokens`` as its response."""
    group = []
    for i in range(2):
        sample = Sample(group_index=number, index=2 * number + i, prompt=f"p{number} é\n", metadata={"n": [number]})
        if tokens:
            sample.append_response_tokens(tokens=tokens, log_probs=[-t / 7 for t in tokens], text="x" * len(tokens))
        sample.status = status
        group.append(sample)
    return group


def random_step(rng: random.Random) -> Step:
    """Return one thing that a run may tell its journal."""
    kind = rng.choice(["dispatched", "completed", "completed", "returned", "consumed"])
    number = rng.randrange(6)
    tokens = [rng.randrange(1000) for _ in range(rng.choice([1, 3, 40]))]
    if kind == "dispatched":
        return (kind, [rng.randrange(6) for _ in range(rng.randrange(1, 4))])
    if kind == "consumed":
        return (kind, rng.randrange(3), [rng.randrange(6) for _ in range(rng.randrange(4))])
    if kind == "completed":
        return (kind, number, tokens, COMPLETED)
    return (kind, number, *rng.choice([([], PENDING), (tokens, ABORTED), (tokens, COMPLETED)]))


def tell(journal: GroupJournal, step: Step) -> None:
    """Tell ``journal`` one step, and change the group afterwards, as a run does."""
    if step[0] == "dispatched":
        journal.dispatched([make_group(number, [], PENDING) for number in step[1]])
    elif step[0] == "consumed":
        journal.consumed(step[1], step[2])
    else:
        group = make_group(*step[1:])
        (journal.completed if step[0] == "completed" else journal.returned)(group)
        for sample in group:
            sample.tokens.append(-1)
            sample.metadata["n"].append("later")
            sample.status = Sample.Status.FAILED


def model(steps: list[Step]) -> tuple[list[int], dict[int, Any], dict[int, list[int]]]:
    """Return what is known after ``steps``: groups dispatched, groups with their samples, groups by rollout."""
    dispatched: list[int] = []
    generated: dict[int, Any] = {}
    consumed: dict[int, list[int]] = {}
    for step in steps:
        if step[0] == "dispatched":
            dispatched = [*dispatched, *step[1]]
        elif step[0] == "consumed":
            consumed[step[1]] = step[2]
        else:
            generated[step[1]] = make_group(*step[1:])
            if step[0] == "returned" and step[3] is PENDING:
                del generated[step[1]]
    return dispatched, generated, consumed


def reopened(folder: Path, rollout_id: int) -> tuple[GroupJournal, Any]:
    """Start again: return the journal and what it says."""
    journal = GroupJournal(folder, SETTING)
    replay = journal.resume(rollout_id)
    return journal, (replay.dispatched, replay.generated, replay.consumed)


def damage(data: bytes, rng: random.Random) -> tuple[bytes, int]:
    """Cut ``data`` at any byte, change a byte, or add rubbish; return it and how many whole lines stay at its start."""
    at = rng.randrange(len(data) + 1)
    kind = rng.choice(["cut", "cut", "change", "add"])
    if kind == "add":
        cut = data.splitlines(keepends=True)[-1][: -1 - rng.randrange(20)]
        return data + rng.choice([b"\0" * 100, b'{"crc":"', b"\n", cut]), data.count(b"\n")
    if kind == "change" and at < len(data):
        changed = data[at] ^ rng.randrange(1, 256)
        return data[:at] + bytes([changed]) + data[at + 1 :], data[:at].count(b"\n")
    return data[:at], data[:at].count(b"\n")


def is_refused(whole: bytes, data: bytes) -> bool:
    """True if no kill leaves ``data`` of ``whole``, with a line's beginning after it, or empty blocks."""
    added = data[len(whole) :] if data.startswith(whole) else b""
    torn = whole.startswith(data) or data.endswith(b"\0")
    return not torn and (not added or added.endswith(b"\n"))


def check_one_history(folder: Path, seed: int) -> None:
    """Tell a journal a random history, damage its file, and start again twice: it says what the model does."""
    rng = random.Random(seed)
    folder.mkdir()
    before = [random_step(rng) for _ in range(rng.randrange(8))]
    journal, nothing = reopened(folder, 4)
    assert nothing == model([])
    for step in before:
        tell(journal, step)
        if rng.random() < 0.2:
            journal.flush()
    journal.flush()
    path = journal.path(4)
    whole = path.read_bytes()
    assert whole.count(b"\n") == len(before) + 1
    data, lines = damage(whole, rng)
    path.write_bytes(data)
    if is_refused(whole, data):
        with pytest.raises(ValueError, match=re.escape(f"{path} is damaged at byte ")):
            reopened(folder, 4)
        path.write_bytes(whole)
        lines = len(before) + 1
    kept = before[: max(0, lines - 1)]
    again, found = reopened(folder, 4)
    assert found == model(kept)
    after = [random_step(rng) for _ in range(rng.randrange(5))]
    for step in after:
        tell(again, step)
    again.flush()
    assert reopened(folder, 4)[1] == model(kept + after)
