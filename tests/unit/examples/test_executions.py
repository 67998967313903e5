"""Shared code of the examples whose executions are several samples."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from examples.executions import conversation_of, problem_of, response_tokens, settings_of, shuffled_rewards
from slime.utils.types import Sample
from tests.support.agents import END, ToolTokenizer
from tests.support.arguments import run_args


@dataclass(frozen=True)
class Settings:
    size: int = 3
    prompts: Mapping[str, str] = field(default_factory=dict)


def test_settings_have_defaults_and_those_of_the_file():
    texts = {"ask": "a", "tell": "t"}
    assert settings_of(Namespace(other=1), Settings, "own_", texts) == Settings(3, texts)
    given = Namespace(own_size=4, own_prompts={"tell": "T"})
    assert settings_of(given, Settings, "own_", texts) == Settings(4, {"ask": "a", "tell": "T"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"own_sise": 4}, "own_sise is not read by anything, expected one of own_size, own_prompts"),
        ({"own_prompts": {"aks": ""}}, "own_prompts: aks is not read by anything, expected one of own_prompts: ask"),
    ],
)
def test_what_nothing_reads_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        settings_of(Namespace(**given), Settings, "own_", {"ask": "a"})


def test_a_conversation_of_an_execution():
    prompt = [{"role": "user", "content": "x"}]
    asked = Sample(index=7, group_index=3, prompt=prompt, label="y", metadata={"row": 1}, session_id="s")
    one = conversation_of(asked, [1, 2], agent="planner")
    assert (one.index, one.group_index, one.rollout_id, one.label, one.session_id) == (7, 3, 7, "y", "s")
    assert (one.tokens, one.response_length, one.prompt) == ([1, 2], 0, asked.prompt)
    assert one.metadata == {"row": 1, "agent": "planner"}
    assert asked.metadata == {"row": 1}
    asked.metadata["abort_reason"] = "service.executor"
    assert conversation_of(asked, []).metadata == {"row": 1}
    assert problem_of(asked) == "x"
    assert problem_of(Sample(prompt="text")) == "text"


@pytest.mark.parametrize(("text", "expected"), [(f"p:a{END}b{END}", f"a{END}b"), ("p:ab", "ab"), (f"p:{END}{END}", "")])
def test_the_response_without_its_end(text, expected):
    sample = Sample(tokens=[ord(c) for c in text], response_length=len(text) - 2)
    assert response_tokens(ToolTokenizer(), sample) == [ord(c) for c in expected]


def test_shuffled_rewards_are_dealt_to_executions():
    """With unequal numbers of samples: those of an execution have one reward, and as many executions are rewarded."""
    turns = [1, 3, 2, 4, 1, 1, 5, 2]
    earned = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    samples = [
        Sample(index=10 + execution, rollout_id=10 + execution, group_index=execution // 4, reward=earned[execution])
        for execution, count in enumerate(turns)
        for _ in range(count)
    ]
    args = run_args(advantage_estimator="grpo", grpo_std_normalization=False)
    raw, dealt = shuffled_rewards(args, samples)
    assert raw == [sample.reward for sample in samples]
    found: dict[int, set[float]] = {}
    for sample, reward in zip(samples, dealt, strict=True):
        found.setdefault(sample.rollout_id, set()).add(reward)
    assert {len(rewards) for rewards in found.values()} == {1}
    means = [rewards.pop() for rewards in found.values()]
    for group in (means[:4], means[4:]):
        assert statistics.fmean(group) == pytest.approx(0, abs=1e-12)
    high = sum(mean > 0 for mean in means)
    assert high == 3  # the number of those that earned a 1, wherever they are
    assert [mean > 0 for mean in means] != [reward > 0 for reward in earned]


def test_samples_without_an_execution_are_dealt_one_by_one():
    samples = [Sample(index=i, group_index=0, reward=float(i == 1)) for i in range(4)]
    args = run_args(advantage_estimator="grpo", grpo_std_normalization=False)
    assert sorted(shuffled_rewards(args, samples)[1]) == pytest.approx([-0.25, -0.25, -0.25, 0.75])
