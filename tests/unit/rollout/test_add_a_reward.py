"""Following the page "Add a built-in reward" is enough: flag, rules, workers and the first look know the entry."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slime.algorithms.reward_types import REWARD_TYPES
from slime.utils.misc import load_function
from tests.support.followed_page import follow, run_followed
from tests.support.run_train import ROOT

PAGE = ROOT / "docs" / "en" / "developer_guide" / "add_a_reward.md"
PROGRAM = r"""
import asyncio, json
from slime.arguments.groups import slime_flags
from slime.rollout.rm_hub import async_rm, rules
from slime.utils.types import Sample
from tests.support.arguments import dry, run_args

async def rewards(*cases):
    args = run_args(reward_workers=1)
    return [
        await async_rm(args, Sample(index=0, response=response, label=label, metadata={"rm_type": kind}))
        for kind, response, label in cases
    ]

print(json.dumps({
    "rewards": asyncio.run(rewards(
        ("last_number", "<think>7</think>It is 41. No, it is 42.", "6 * 7 #### 42"),
        ("last_number", "42, or 41", ["40", "42"]),
        ("last_number", "no idea", 42),
        ("boxed_last_number", r"\boxed{42} of 100", 42),
    )),
    "accepted": dry("--rm-type", "boxed_last_number").rm_type,
    "help": next(flag.help for flag in slime_flags() if flag.dest == "rm_type"),
    "first look": rules.best_answers("last_number", "6 * 7 #### 42", {}),
}))
"""


def test_following_the_page_adds_a_reward(tmp_path: Path) -> None:
    follow(PAGE, tmp_path)
    found = run_followed(tmp_path, PROGRAM)
    assert found["rewards"] == [1, 0, 0, 1]
    assert found["accepted"] == "boxed_last_number"
    assert "ifbench, random or last_number" in found["help"]
    assert [answer.strip() for answer in found["first look"]] == ["42"]


@pytest.mark.parametrize("name", REWARD_TYPES)
def test_every_function_of_the_table_can_be_loaded(name: str) -> None:
    kind = REWARD_TYPES[name]
    paths = [kind.function, *(path for path in (kind.best_answers, kind.prepare) if path)]
    assert all(callable(load_function(path)) for path in paths)
    if kind.module is not None:
        assert kind.missing
        assert importlib.util.find_spec(kind.module) is not None or kind.prepare is not None
