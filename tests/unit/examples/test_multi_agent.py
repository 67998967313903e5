"""Masks, rewards and the flow from solvers to the selector, against an engine that answers by a function."""

from __future__ import annotations

import json
from collections import Counter
from unittest import mock

import pytest

from examples.multi_agent import rollout_with_multi_agents
from examples.multi_agent.agent_system import judgment, visible_answer
from examples.multi_agent.make_data import make_data
from examples.multi_agent.rollout_with_multi_agents import generate_with_multi_agents, log_agents
from slime.rollout.rm_hub.failure import RewardFailure
from slime.utils.types import Sample
from tests.support.agents import END, ToolTokenizer
from tests.support.episodes import player, trained

SHORT = {"solver": "solve {problem}", "solution": "{number}:{solution}", "rewriter": "rewrite {problem}\n{solutions}",
         "selector": "select {problem} of {count}\n{solutions}"}  # fmt: skip


def sample() -> Sample:
    return Sample(index=7, group_index=3, prompt=[{"role": "user", "content": "1+1"}], label="2", metadata={"row": 1})


def agents(**flags: object):
    custom = {"num_parallel": 2, "multi_agent_prompts": SHORT, **flags}
    return player(generate_with_multi_agents, custom, custom_rm_path=f"{__name__}.ends_with_the_label")


async def ends_with_the_label(args: object, sample: Sample) -> float:
    return float(sample.response.endswith(str(sample.label) + END))


class Model:
    """Solvers and rewriters answer with the next of these, the selector with the last."""

    def __init__(self, solvers: list[str], rewriters: list[str] = (), selector: str = "") -> None:  # type: ignore[assignment]
        self.answers = {"solve": list(solvers), "rewrite": list(rewriters), "select": [selector]}
        self.asked: dict[str, str] = {}

    def __call__(self, turns: list[str]) -> str:
        role = turns[0].split()[0]
        self.asked[role] = turns[0]
        return self.answers[role].pop()


def by_agent(samples: list[Sample]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for one in samples:
        found.setdefault(one.metadata["agent"], []).append((one.metadata["rule_reward"], one.reward))
    return {role: sorted(rewards) for role, rewards in found.items()}


@pytest.mark.parametrize(
    ("rewriters", "selector", "choice", "weight"),
    [
        (["t</think>2", "t</think>3"], "t</think>Judgment: 1", None, None),
        (["t</think>3", "t</think>2"], "Judgment: 1 no</think>Judgment: 2", None, None),
        (["t</think>2", "t</think>2"], "t</think>Judgment: 2", 1.0, 1.2),
        (["t</think>3", "t</think>3"], "t</think>Judgment: 1", 0.0, 0.8),
        (["t</think>2", "t</think>2"], "t</think>Judgment: 3", 0.0, 0.8),
        (["t</think>2", "t</think>2"], "t</think>the first", 0.0, 0.8),
    ],
)
def test_the_selector_has_the_reward_of_its_choice_and_all_are_weighted(rewriters, selector, choice, weight):
    """Requests arrive in any order: where the two rewriters differ, the selector's prompt says which is which."""
    model = Model(["t</think>2", "t</think>5"], rewriters, selector)
    with agents() as play:
        samples = play(model, sample())
    if choice is None:
        number = int(selector.rpartition(" ")[2])
        choice = float(f"{number}:2" in model.asked["select"])
        weight = 1.2 if choice else 0.8
    ruled = sorted(float(text.endswith("2")) for text in rewriters)
    assert by_agent(samples) == {
        "solver": [(0.0, 0.0), (1.0, weight)],
        "rewriter": [(reward, reward * weight) for reward in ruled],
        "selector": [(choice, choice * weight)],
    }
    assert {(one.rollout_id, one.index, one.group_index, one.metadata["row"]) for one in samples} == {(7, 7, 3, 1)}
    assert sorted(model.asked["rewrite"].splitlines()[1:], key=lambda line: line[2:]) in (
        ["1:2", "2:5"],
        ["2:2", "1:5"],
    )
    for one in samples:
        assert trained(one) == one.response
        assert one.response.endswith(END)
        assert one.loss_mask is None or set(one.loss_mask) == {1}
        assert len(one.rollout_log_probs) == one.response_length


def test_an_execution_ends_where_no_answer_is_passed_on():
    with agents() as play:
        samples = play(Model(["2", "a</think>b</think>5"]), sample())
        assert by_agent(samples) == {"solver": [(0.0, 0.0), (1.0, 0.8)]}
        only_one = play(Model(["t</think>2", "2"], ["2", "2"]), sample())
        assert Counter(one.metadata["agent"] for one in only_one) == {"solver": 2, "rewriter": 2}
        assert {one.reward for one in only_one} == {0.8}


def test_an_evaluation_scores_the_selected_solution():
    with agents(num_parallel=1, correct_reward_weight=3.0) as play:
        right = play(Model(["t</think>5"], ["t</think>2"], "</think>Judgment: 1"), sample(), evaluation=True)
        wrong = play(Model(["t</think>2"], ["t</think>5"], "</think>Judgment: 1"), sample(), evaluation=True)
        none = play(Model(["2"]), sample(), evaluation=True)
    assert (right.reward, wrong.reward, none.reward) == (1.0, 0.0, 0.0)
    assert right.metadata["agent"] == "rewriter"


def test_a_reward_that_fails_aborts_the_execution():
    async def failing(*arguments: object) -> float:
        raise RewardFailure("timeout", "slow")

    with mock.patch("examples.multi_agent.agent_system.async_rm", failing), agents() as play:
        lost = play(Model(["t</think>2"] * 2, ["t</think>2"] * 2, "</think>Judgment: 1"), sample())
    assert lost.status == Sample.Status.ABORTED
    assert lost.metadata["abort_reason"] == "reward.timeout"


def test_which_answers_are_passed_on():
    tokens = [ord(c) for c in f"prompt a</think> b {END}"]
    done = Sample(tokens=tokens, response_length=len(tokens) - 7, status=Sample.Status.COMPLETED)
    assert visible_answer(ToolTokenizer(), done, "</think>") == "b"
    assert visible_answer(ToolTokenizer(), done, "") == "a</think> b"
    done.status = Sample.Status.TRUNCATED
    assert visible_answer(ToolTokenizer(), done, "") is None
    assert judgment("Judgment: 1, no: Judgment:2", 2) == 1
    assert judgment("Judgment: 0", 2) is None


def test_the_metrics(monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(rollout_with_multi_agents, "log", lambda args, metrics, step: logged.append(metrics))
    samples = [
        Sample(rollout_id=execution, metadata={"agent": role, "rule_reward": reward})
        for execution, role, reward in [
            (0, "solver", 1.0),
            (0, "solver", 0.0),
            (1, "solver", 1.0),
            (1, "rewriter", 1.0),
        ]
    ]
    assert log_agents(4, None, samples, {}, 1.0) is False
    [metrics] = logged
    assert metrics["rollout/multi_agent/solver"] == pytest.approx(2 / 3)
    assert metrics["rollout/multi_agent/rewriter"] == 1.0
    assert metrics["rollout/multi_agent/samples_per_execution"] == 2.0
    assert "rollout/multi_agent/selector" not in metrics


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=1500)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    asked = {name: {row["messages"][0]["content"][:6] for row in group} for name, group in rows.items()}
    assert not asked["sums"] & (asked["sft"] | asked["train"])
    kinds = Counter(len(row["messages"][0]["content"].split("\n")) for row in rows["sft"])
    assert kinds.keys() == {1, 3}
    for row in rows["sums"]:
        a, b = row["messages"][0]["content"].removesuffix("=").split("+")
        assert int(row["label"]) == int(a) + int(b)
