"""Thousands of answers whose verdicts follow from how they were made, and what math-verify says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.rollout.rm_hub import rules
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
