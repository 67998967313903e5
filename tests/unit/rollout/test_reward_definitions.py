"""Built-in rewards by their definitions: cases that a reader of the definitions alone wrote, meant to trip them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.rm_hub import async_rm, remote, rules
from slime.servers.http_client import HttpRequestError
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin import Failure, StandInCluster

MATH = [
    (r"so \boxed{42}", "42", 1),
    ("42", "42", 0),
    ("the answer is 42.", "42", 0),
    (r"\boxed{1}, no: \boxed{2}", "2", 1),
    (r"\boxed{1}, no: \boxed{2}", "1", 0),
    (r"\fbox{7}", "7", 1),
    (r"\boxed{1} \fbox{7}", "1", 1),  # of MATH: \fbox counts where there is no \boxed
    (r"\boxed{\boxed{42}}", "42", 1),
    (r"\boxed{0.5}", r"so it is \boxed{\frac{1}{2}}", 1),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac{3}{4}}", r"\tfrac{3}{4}", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{1000}", "1,000", 1),
    (r"\boxed{x+1}", "1+x", 1),
    (r"\boxed{(1,2)}", "(1, 2)", 1),
    (r"\boxed{(1,2)}", "(2,1)", 0),
    (r"\boxed{(1,2)}", "[1,2]", 0),
    (r"\boxed{(1,2,3)}", "(1,2)", 0),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{\$5}", "5", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{\text{Alice}}", "Alice", 1),
    (r"\boxed{\text{Alice}}", "Bob", 0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", 1),
    (r"\boxed{1", "1", 0),
    (r"\boxed{42}", 42, 1),
    (r"\boxed{-5}", "5", 0),
    (r"\boxed{5}", "-5", 0),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{1/2}", "0.5", 1),
    (r"\boxed{ 5 }", " 5", 1),
    (r"\boxed{2}", "20", 0),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{9^{9^{9}}}", "1", 0),
    (r"\boxed{\left( 1, \frac{1}{2} \right)}", "(1, 0.5)", 1),
    (r"\boxed{(-\infty, 2]}", r"(-\infty,2]", 1),
    (r"\boxed{(-\infty, 2]}", r"(-\infty,2)", 0),
    ("", "1", 0),
]
DEEPSCALER = [
    (r"<think>hm</think> \boxed{3}", "3", 1),
    (r"\boxed{3}", "3", 0),
    (r"<think>\boxed{3}</think> three", "3", 0),
    (r"a</think>\boxed{1}</think>\boxed{2}", "2", 1),
    (r"a</think>\boxed{1}</think>\boxed{2}", "1", 0),
    (r"###Response \boxed{3}", "3", 1),
    (r"\boxed{9} ###Response \boxed{3}", "3", 1),
    (r"\boxed{3} ###Response none", "3", 0),
    (r"###Response \boxed{3} ###Response \boxed{4}", "3", 0),
    (r"###Response \boxed{3} ###Response \boxed{4}", "4", 1),
    (r"###Response x</think>\boxed{3}", "3", 1),
    (r"</think>\boxed{3}", "", 0),
    (r"</think>\boxed{}", "", 0),
    (r"</think>\boxed{3}", None, 0),
    (r"</think>\boxed{3}", r"\boxed{3}", 1),
    (r"</think>\boxed{3}", 3, 1),
    (r"</think>\boxed{\frac{1}{2}}", 0.5, 1),
    (r"</think>\boxed{4}", "3", 0),
]
DAPO = [  # (response, label, right, what is taken for the answer)
    ("Answer: 42", "42", True, "42"),
    ("answer : 42", "42", True, "42"),
    ("ANSWER:42", "42", True, "42"),
    ("Answer: 41", "42", False, "41"),
    ("Answer: 1\nAnswer: 42", "42", True, "42"),
    ("Answer: 42\nAnswer: 1", "42", False, "1"),
    ("Answer: 42" + "x" * 290, "42", False, None),
    ("y" * 500 + "\nAnswer: 42", "42", True, "42"),
    ("Answer: 42" + "\n" * 300, "42", False, "[INVALID]"),
    ("it is 42", "42", False, "[INVALID]"),
    ("Answer: $42$", "42", True, "42"),
    ("Answer: 1,000", "1000", True, "1000"),
    ("Answer: x = 42", "42", True, "42"),
    (r"Answer: \boxed{42}", "42", True, "42"),
    ("Answer: 42", "42.0", True, "42"),
    ("Answer: 42", 42, True, "42"),
    ("Answer: -3", "-3", True, "-3"),
    ("Answer:\n42", "42", None, None),  # the pattern allows any white space before the answer
]
F1 = [
    ("The cat", "cat", 1.0),
    ("A cat, an owl", "cat owl", 1.0),
    ("yes", "no", 0.0),
    ("Yes!", "yes", 1.0),
    ("yes it is", "yes", 0.0),
    ("yes", "yes it is", 0.0),
    ("no answer", "noanswer", 0.0),
    ("a b c", "b c d", 0.8),
    ("b b", "b", 2 / 3),
    ("b", "b b", 2 / 3),
    ("", "x", 0.0),
    ("x y", "z", 0.0),
    ("New-York", "newyork", 1.0),
]
CHOICES = {"choices": ["red", "green", "blue", "black"]}
GPQA = [
    ("Answer: C", "C", {}, 1.0),
    ("<think>Answer: A</think> Answer: B", "B", {}, 1.0),
    ("<think>Answer: A</think> Answer: B", "A", {}, 0.0),
    ("The answer is (D).", "D", {}, 1.0),
    (r"\boxed{B}", "B", {}, 1.0),
    (r"\boxed{\text{B}}", "B", {}, 1.0),
    ("Answer: C", "whatever", {"correct_letter": "C"}, 1.0),
    ("Answer: C", "A", {"correct_letter": "C"}, 1.0),
    ("Answer: C", 2, CHOICES, 1.0),
    ("Answer: C", 1, CHOICES, 0.0),
    ("Answer: C", "blue", CHOICES, 1.0),
    ("Answer: C", None, {**CHOICES, "correct_answer": "blue"}, 1.0),
    ("Answer: C", None, {**CHOICES, "answer_text": "red"}, 0.0),
    ("Answer: E", "A", {"valid_letters": ["A", "B"]}, 0.0),
    ("I think a good answer is B", "B", {}, 1.0),
    ("I think a good answer is B", "A", {}, 0.0),
    ("Option B is wrong, option C is right.\nAnswer: C", "C", {}, 1.0),
    ("**Answer: B**", "B", {}, 1.0),
    ("Answer: A or B? Finally, answer: B", "B", {}, 1.0),
    ("B", "B", {}, 1.0),
    ("nothing to say", "B", {}, 0.0),
    ("", "B", {}, 0.0),
]
BOXED = [
    ("boxed_f1", r"so \boxed{cat}", "cat", 1.0),
    ("boxed_f1", "cat", "cat", 0.0),
    ("boxed_math", r"Answer: \boxed{42}", "42", 1),
    ("boxed_math", r"\boxed{\boxed{42}}", "42", 1),
    ("boxed_math", r"42", "42", 0),
    ("boxed_math", r"\boxed{41}", "42", 0),
    ("boxed_gpqa", r"Answer: A \boxed{Answer: B}", "B", 1.0),
    ("boxed_dapo", r"Answer: 1 \boxed{Answer: 42}", "42", {"score": 1.0, "acc": True, "pred": "42"}),
    ("boxed_dapo", r"so \boxed{42}", "42", {"score": 1.0, "acc": True, "pred": "42"}),
    ("boxed_dapo", r"so 42", "42", {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("boxed_gpqa", r"\boxed{\text{B}}", "B", 1.0),
    ("boxed_deepscaler", r"</think>\boxed{3}", "3", 1),
    ("boxed_deepscaler", r"\boxed{3}", "3", 1),
    ("boxed_deepscaler", r"3", "3", 0),
]


@pytest.mark.parametrize(("response", "label", "expected"), MATH)
def test_math(response, label, expected):
    reward = rules.grade("math", response, label, {})
    assert (reward, isinstance(reward, int)) == (expected, True)


@pytest.mark.parametrize(("response", "label", "expected"), DEEPSCALER)
def test_deepscaler(response, label, expected):
    assert rules.grade("deepscaler", response, label, {}) == expected


@pytest.mark.parametrize(("response", "label", "right", "taken"), DAPO)
def test_dapo(response, label, right, taken):
    reward = rules.grade("dapo", response, label, {})
    assert set(reward) == {"score", "acc", "pred"}
    assert reward["score"] == (1.0 if reward["acc"] else -1.0)
    assert isinstance(reward["acc"], bool)
    assert isinstance(reward["pred"], str)
    if right is not None:
        assert reward["acc"] is right
    if taken is not None:
        assert reward["pred"] == taken


@pytest.mark.parametrize(("response", "label", "expected"), F1)
def test_f1(response, label, expected):
    assert rules.grade("f1", response, label, {}) == pytest.approx(expected)


@pytest.mark.parametrize(("response", "label", "metadata", "expected"), GPQA)
def test_gpqa(response, label, metadata, expected):
    reward = rules.grade("gpqa", response, label, metadata)
    assert (reward, type(reward)) == (expected, float)


def args(**changes: Any) -> Namespace:
    return run_args(**changes)


@pytest.mark.parametrize(("kind", "response", "label", "expected"), BOXED)
async def test_boxed(kind, response, label, expected):
    assert await async_rm(args(rm_type=kind), Sample(index=0, response=response, label=label)) == expected


@pytest.mark.parametrize("kind", ["boxed_", "boxed_unknown", "boxed_boxed_math", "Math", "none"])
async def test_what_is_no_reward(kind):
    with pytest.raises(NotImplementedError, match="is unknown"):
        await async_rm(args(rm_type=kind), Sample(index=0, response=r"\boxed{1}", label="1"))


async def test_random_is_both():
    rewards = [await async_rm(args(rm_type="random"), Sample(index=0)) for _ in range(100)]
    assert set(rewards) == {0, 1}


def test_expressions_are_never_run(tmp_path: Path):
    trace = tmp_path / "trace"
    for code in (f"__import__('os').system('touch {trace}')", f"open('{trace}','w')", "().__class__.__base__"):
        for kind in ("math", "deepscaler"):
            rules.grade(kind, rf"</think>\boxed{{{code}}}", "x", {})
            rules.grade(kind, r"</think>\boxed{x}", code, {})
    assert not trace.exists()


@pytest.mark.parametrize(
    "bomb", ["9^9^9^9", "(" * 3000 + "1" + ")" * 3000, "1" * 100_000, r"\frac{" * 2000, "x^{" * 500]
)
def test_hostile_answers_end(bomb):
    assert rules.grade("math", rf"\boxed{{{bomb}}}", "7", {}) == 0


async def test_a_server_is_asked_ten_times_with_growing_pauses(monkeypatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(remote, "_client", None)
    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    with StandInCluster(1) as cluster:
        engine = cluster.engines[0]
        engine.failures.extend([Failure(500, b"no")] * 10)
        with pytest.raises(HttpRequestError, match="no"):
            await async_rm(args(rm_type="remote_rm", rm_url=f"{engine.url}/generate"), Sample(index=0))
        assert len(engine.requests) == 10
        await remote.get_client().close()
    pauses = [pause for pause in pauses if pause >= 1]
    assert [int(pause) for pause in pauses] == [2, 4, 8, 16, 30, 30, 30, 30, 30]
