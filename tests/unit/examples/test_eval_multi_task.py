"""Rewards, metric and data of the evaluations of several tasks."""

from __future__ import annotations

import asyncio
import json

import pytest

from examples.eval_multi_task import rewards
from examples.eval_multi_task.make_data import make_data
from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args


@pytest.mark.parametrize(
    ("response", "reward"), [("BADE<|im_end|>", 1.0), ("bade", 0.0), ("BADEL", 0.0), ("<think>x</think>BADE", 1.0)]
)
def test_a_word_in_capitals(response, reward):
    assert asyncio.run(rewards.in_capitals(None, Sample(response=response, label="bade"))) == reward


def test_best_of_n_is_a_mean_over_prompts(monkeypatch):
    logged = []
    monkeypatch.setattr(rewards, "log", lambda args, metrics, step: logged.append((metrics, step)))
    given = [(0, 0.0), (1, 0.0), (0, 1.0), (2, -1.0), (2, -3.0)]
    data = {
        "a": {"samples": [Sample(group_index=group) for group, _ in given], "rewards": [r for _, r in given]},
        "b": {"samples": [Sample(group_index=0)], "rewards": [0.5]},
    }
    assert rewards.log_best_of_n(6, None, data, {}) is False
    assert logged == [({"eval/a/best_of_n": 0.0, "eval/b/best_of_n": 0.5, "eval/step": 6}, "eval/step")]


def test_every_row_of_training_has_a_reward_of_its_own(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=900)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    asked = {name: {row["messages"][0]["content"] for row in group} for name, group in rows.items()}
    for name in ("addition", "choice", "capitals"):
        assert len(rows[name]) == 256
        assert not asked[name] & (asked["sft"] | asked["train"])
    for row in rows["choice"]:
        numbers = {word[0]: int(word[1:]) for word in row["messages"][0]["content"].split()}
        assert row["label"] == max(numbers, key=numbers.__getitem__)
    args = rollout_args()

    async def scores() -> None:
        for row in rows["train"][:8]:
            right, wrong = row["label"], "999" if row["label"].isdigit() else "E"
            for said, expected in ((right, 1.0), (wrong, 0.0)):
                one = Sample(index=0, response=f"{said}<|im_end|>", label=row["label"], metadata=row["metadata"])
                assert await async_rm(args, one) == expected

    asyncio.run(scores())
    assert {row["metadata"]["rm_type"] for row in rows["train"]} == {"f1", "gpqa"}
