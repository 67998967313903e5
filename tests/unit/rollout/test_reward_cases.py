"""Every case of tests/data/rewards: outcomes worked out from each task's published rules, not from the graders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample
from tests.support.arguments import run_args

DATA = Path(__file__).resolve().parents[2] / "data" / "rewards"
FILES = sorted(DATA.glob("*.jsonl"))


def cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_are_enough_of_them():
    assert {path.stem for path in FILES} == {"boxed", "dapo", "deepscaler", "f1", "gpqa", "math"}
    assert sum(len(cases(path)) for path in FILES) >= 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_outcomes(path):
    wrong = []
    for number, case in enumerate(cases(path), start=1):
        args = run_args(rm_type=case["type"])
        sample = Sample(index=number, response=case["response"], label=case["label"], metadata=case.get("metadata", {}))
        reward = await async_rm(args, sample)
        expected = case["expected"]
        same = reward == (pytest.approx(expected, abs=1e-12) if isinstance(expected, float) else expected)
        if not same or type(reward) is not type(expected):
            wrong.append(f"line {number} ({case['why']}): got {reward!r}, expected {expected!r}")
    assert not wrong, "\n".join(wrong)
