"""Pairings of a tournament, the reward of a win, and a judge that prefers a place."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import Counter
from unittest import mock

import pytest

from examples.tournament import judges, reward
from examples.tournament.judges import nearer_number
from examples.tournament.reward import pairs_of, tournament
from slime.arguments.files.eval_config import EvalDatasetConfig
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer

ARGS = Namespace(tournament_judge="examples.tournament.judges.nearer_number")


def answers(*responses: str, label: str = "50") -> list[Sample]:
    return [Sample(index=i, response=r, label=label, status=Sample.Status.COMPLETED) for i, r in enumerate(responses)]


def test_all_or_a_circle_of_pairs():
    assert pairs_of(3, 9) == [(0, 1), (0, 2), (1, 2)]
    for count, opponents in [(8, 2), (7, 2), (9, 3), (8, 3)]:
        played = pairs_of(count, opponents)
        assert len({frozenset(pair) for pair in played}) == len(played) == count * opponents
        assert set(Counter(player for pair in played for player in pair).values()) == {2 * opponents}


def test_the_reward_is_the_share_of_comparisons_won():
    """Distances 0, 1, 1 and none: 3 of 3; half and 1 of the others; 0."""
    samples = answers("050<|im_end|>", "051", "049", "many")
    assert asyncio.run(tournament(ARGS, samples)) == pytest.approx([1.0, 0.5, 0.5, 0.0])
    assert asyncio.run(tournament(ARGS, samples[:1])) == [0.0]


@pytest.mark.parametrize("opponents", [1, 2, 8])
def test_the_rewards_of_a_group_add_up_to_half_of_it(opponents):
    args = Namespace(**vars(ARGS), tournament_opponents=opponents)
    rewards = asyncio.run(tournament(args, answers(*map(str, (50, 12, 47, 47, 90, 50, 1)))))
    assert sum(rewards) == pytest.approx(3.5)


def test_an_answer_that_was_cut_loses_unjudged():
    samples = answers("50", "9", "50")
    samples[0].status = samples[2].status = Sample.Status.TRUNCATED
    with mock.patch.object(judges, "nearer_number", side_effect=AssertionError):
        assert asyncio.run(tournament(ARGS, samples)) == [0.25, 1.0, 0.25]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["[[A]] no, [[B]]", "[[A]]"], 0.0),
        (["[[A]]", "[[A]]"], 0.5),  # prefers the place
        (["[[A]]", "[[B]]"], 1.0),
        (["[[C]]", "[[B]]"], 0.75),
        (["I cannot say", "[[B]]"], 0.75),
    ],
)
def test_the_frozen_model_is_asked_in_both_orders(verdicts, expected):
    asked = []

    async def post(url: str, payload: dict) -> dict:
        asked.append((url, payload["text"]))
        return {"text": verdicts[len(asked) - 1]}

    prompt = f"{BEGIN}user\nsay it{END}{BEGIN}assistant\n"
    first, second = answers("t</think>one<|im_end|>", "two")
    for sample in (first, second):
        sample.tokens, sample.response_length = [ord(c) for c in prompt + sample.response], len(sample.response)
    state = Namespace(tokenizer=ToolTokenizer())
    with (
        mock.patch.multiple(judges, post=post, GenerateState=lambda args: state, get_model_url=lambda args, name: name),
    ):
        assert asyncio.run(judges.frozen_model(Namespace(), first, second)) == expected
    assert [url for url, _ in asked] == ["judge", "judge"]
    for (_, text), order in zip(asked, (("one", "two"), ("two", "one")), strict=True):
        assert text.count(BEGIN) == 2  # of the judge's own chat
        assert "say it" in text
        assert "Answer A:\n{}\n\nAnswer B:\n{}\n".format(*order) in text


def test_evaluations_score_single_answers(monkeypatch):
    seen = []
    monkeypatch.setattr(reward, "generate_rollout", lambda args, *rest, **kw: seen.append((args, rest, kw)))
    names = ["a.b", "own.rm"]  # a data set without a reward of its own has that of the run
    datasets = [EvalDatasetConfig(name=name, path="p", custom_rm_path=name) for name in names]
    args = Namespace(group_rm=True, custom_rm_path="a.b", tournament_eval_rm="c.d", eval_datasets=datasets)
    reward.evaluate(args, 5, "source")
    [(used, rest, keywords)] = seen
    assert (used.group_rm, used.custom_rm_path, rest, keywords) == (False, "c.d", (5, "source"), {"evaluation": True})
    assert [one.custom_rm_path for one in used.eval_datasets] == ["c.d", "own.rm"]
    assert args.group_rm
    assert [one.custom_rm_path for one in args.eval_datasets] == names


def test_the_rule():
    pair = answers("49", "52")
    assert asyncio.run(nearer_number(ARGS, *pair)) == 1.0
    assert asyncio.run(nearer_number(ARGS, *reversed(pair))) == 0.0
    assert asyncio.run(nearer_number(ARGS, *answers("x", "-"))) == 0.5
