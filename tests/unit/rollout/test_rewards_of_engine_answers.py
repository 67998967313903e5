"""Thousands of responses in the shape engines return them, stop tokens included, against outcomes known beforehand."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from slime.algorithms.reward_types import REWARD_TYPES
from slime.rollout.rm_hub import async_rm, ifbench, remote, rules
from slime.rollout.rm_hub.answer_text import final_answer, without_end_tokens
from slime.rollout.rm_hub.math_dapo_utils import compute_score, is_correct_strict_box
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, last_boxed_only_string
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.unit.rollout.engine_answers import ENDS, GENERATORS, Case, answers, end


@dataclass
class InputExample:
    """The published form of what IFBench checks."""

    key: int
    instruction_id_list: list[str]
    prompt: str
    kwargs: list[dict[str, Any]]


RULES = {
    "count:words": lambda text, N: len(text.split(" ")) == N,
    "last:word": lambda text, word: text.rstrip().endswith(word),
    "first:word": lambda text, word: text.startswith(word),
}


def follows(example: InputExample, prompt_to_response: dict[str, str]) -> SimpleNamespace:
    text = prompt_to_response[example.prompt].strip(" \n")
    checked = zip(example.instruction_id_list, example.kwargs, strict=True)
    return SimpleNamespace(follow_all_instructions=all(RULES[name](text, **given) for name, given in checked))


@pytest.fixture
def checkers(monkeypatch):
    module = SimpleNamespace(InputExample=InputExample, test_instruction_following_strict=follows, __file__="here")
    monkeypatch.setattr(ifbench, "load_checkers", lambda: module)


def grade(case: Case) -> Any:
    """The reward as a worker computes it; a box is taken out first, as the dispatch does."""
    kind, response = case.kind, case.response
    if kind.startswith("boxed_"):
        kind = kind.removeprefix("boxed_")
        response = rules.as_response(kind, extract_boxed_answer(response) or "")
    return rules.grade(kind, response, case.label, case.metadata)


@pytest.mark.parametrize("kind", list(GENERATORS))
def test_outcomes(kind, checkers):
    wrong = []
    for case in answers(kind):
        reward = grade(case)
        same = reward == (
            pytest.approx(case.expected, abs=1e-12) if isinstance(case.expected, float) else case.expected
        )
        if not same or type(reward) is not type(case.expected):
            wrong.append(f"{case}: got {reward!r}")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])


def test_there_are_thousands_and_both_outcomes_of_each_rule():
    cases = {kind: answers(kind) for kind in GENERATORS}
    assert sum(map(len, cases.values())) >= 2000
    graded = {kind.name for kind in REWARD_TYPES.values() if kind.rule}
    assert graded - {"math_verify"} <= set(cases)  # a package of others, which is tried by itself
    for kind, some in cases.items():
        values = [c.expected["acc"] if isinstance(c.expected, dict) else c.expected > 0 for c in some]
        assert 0.2 < sum(values) / len(values) < 0.8, kind
        ended = sum(any(stop and c.response.rstrip().endswith(stop.strip()) for stop in ENDS) for c in some)
        assert ended > 0.5 * len(some), kind


def args(**changes: Any) -> Namespace:
    return run_args(**changes)


async def test_the_dispatch_gives_the_same_as_the_rules():
    for kind in ("math", "deepscaler", "dapo", "f1", "gpqa", "boxed"):
        for case in answers(kind)[:5]:
            sample = Sample(index=0, response=case.response, label=case.label, metadata=case.metadata)
            reward = await async_rm(args(rm_type=case.kind), sample)
            assert reward == (pytest.approx(case.expected) if isinstance(case.expected, float) else case.expected), case
            assert sample.response == case.response


async def test_random_rewards_and_those_of_a_server_take_responses_as_they_are(monkeypatch):
    asked: list[Any] = []

    async def ask(url: str, payload: dict[str, Any], timeout: float) -> float:
        asked.append(payload["response"])
        return 0.5

    monkeypatch.setattr(remote, "ask", ask)
    responses = [case.response for case in answers("f1")[:100]]
    for response in responses:
        sample = Sample(index=0, response=response, label="x")
        assert await async_rm(args(rm_type="remote_rm", rm_url="http://judge"), sample) == 0.5
        assert await async_rm(args(rm_type="random"), sample) in (0, 1)
    assert asked == responses
    assert (
        await async_rm(args(rm_type="boxed_remote_rm", rm_url="http://judge"), Sample(response=r"\boxed 5</s>")) == 0.5
    )
    assert asked[-1] == "5"


def test_strict_boxes():
    rng = random.Random(0)
    for number in range(200):
        n, right = rng.randint(1, 999), bool(number % 2)
        stop = end(rng)
        response = "y" * rng.randint(0, 400) + rf" \boxed{{{n}}}" + stop
        given = str(n) if right else str(n + 1)
        assert is_correct_strict_box(response, given) == (1 if right else -1, str(n))
        assert compute_score(response, given, strict_box_verify=True)["acc"] is right
        assert is_correct_strict_box(rf"\boxed{{{n}}}" + "z" * 100 + stop, str(n)) == (-1, None)


@pytest.mark.parametrize("stop", ENDS)
def test_what_ends_a_response_is_no_part_of_it(stop):
    assert without_end_tokens("a <b>" + stop) == "a <b>" + ("" if stop else stop)
    assert without_end_tokens(stop + "a") == stop + "a"
    assert last_boxed_only_string(r"so \boxed 5" + stop) == r"\boxed 5"
    assert last_boxed_only_string(r"so \boxed{a{b}}" + stop) == r"\boxed{a{b}}"
    assert last_boxed_only_string(r"so \boxed{5" + stop) is None
    assert final_answer("<think>a</think>\n\n b" + stop) == " b"
    assert final_answer("a</think>b</think>c" + stop) == "c"
    assert final_answer("<think>a" + stop) == ""
    assert final_answer("b <think>a" + stop) == "b "


@pytest.mark.parametrize(
    "text", ["", " \n", "a|>", "<|", "|x|", "<|x|>", "[1,2]", "<b>", "</think>", "</s> then", "1 < 2 > 1"]
)
def test_what_is_no_end_token_stays(text):
    assert without_end_tokens(text) == text


@pytest.mark.parametrize("kind", ["math", "dapo", "f1", "gpqa"])
@pytest.mark.parametrize(
    "text", ["answer: ", " ", "\n", "A ", "(", "**", "\\text{", "</s>", "<|im_end|>", "<think>", "\\boxed ", "is the "]
)
def test_long_repetitions_are_read_in_time(kind, text):
    response = text * (100_000 // len(text))
    rules.grade(kind, response + "x", "C", {})
    rules.grade(kind, "Answer:" + response, "C", {})
