"""Thousands of answers whose verdicts follow from how they were made, and what math-verify says of them."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from slime.rollout.rm_hub import rules
from tests.support import second_opinion
from tests.support.reward_pairs import DATA, PAIRS, lines


def pairs(rule: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{rule}.jsonl").read_text().splitlines()]


def test_there_are_enough_of_them_and_both_outcomes():
    assert sum(len(pairs(rule)) for rule in PAIRS) >= 2500
    for rule in PAIRS:
        right = sum(pair["expected"] > 0 for pair in pairs(rule))
        assert 0.3 < right / len(pairs(rule)) < 0.8, rule


@pytest.mark.parametrize("rule", PAIRS)
def test_the_files_are_what_their_generators_make(rule):
    assert (DATA / f"{rule}.jsonl").read_text().splitlines() == lines(rule)


@pytest.mark.parametrize("rule", PAIRS)
def test_verdicts(rule):
    wrong = []
    for pair in pairs(rule):
        reward = rules.grade(rule, pair["response"], pair["label"], pair["metadata"])
        reward = float(reward["acc"]) if rule == "dapo" else reward
        if reward != pytest.approx(pair["expected"], abs=1e-12):
            wrong.append(f"{pair['family']}: {pair['response']} / {pair['label']}: {reward} ({pair['why']})")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:20])


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in second_opinion.FILE.read_text().splitlines()]


def test_every_difference_from_math_verify_is_decided():
    made = {json.dumps(pair, sort_keys=True) for pair in second_opinion.all_pairs()}
    for row in kept():
        verdict, decided = row.pop("math_verify"), row.pop("decided")
        assert json.dumps(row, sort_keys=True) in made
        assert (row["expected"] == 1) != verdict
        assert decided == second_opinion.DECISIONS[row["why"]]
    assert {row["why"] for row in kept()} == set(second_opinion.DECISIONS)


needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the package math-verify is not installed"
)


@needs_math_verify
@pytest.mark.slow
def test_some_of_what_math_verify_says():
    some = second_opinion.all_pairs()[::61]
    assert second_opinion.differences(some) == [row for row in kept() if _pair(row) in some]


@needs_math_verify
@pytest.mark.soak
def test_all_of_what_math_verify_says():
    assert second_opinion.differences(second_opinion.all_pairs()) == kept()


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("math_verify", "decided")}
