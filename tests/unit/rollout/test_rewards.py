r"""Rewards: every expectation was worked out by hand from the task's wording, not from the grader's output."""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from typing import Any

import pytest

from slime.rollout.rm_hub import async_rm, batched_async_rm, remote, remote_rm
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.failure import RewardFailure
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer_sympy,
    grade_answer_verl,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.servers.http_client import HttpRequestError
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin import Failure, StandInCluster
from tools.metric_names import undocumented

HERE = __name__


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 42$ ok", "42"),
        (r"\boxed{}", ""),
        (r"\boxed {3}", "3"),
        (r"no box, 5", None),
        (r"\boxed{5", None),
        (r"\boxed", None),
    ],
)
def test_the_last_box_is_the_answer(text, answer):
    assert extract_answer(text) == answer


def test_boxes():
    assert last_boxed_only_string(r"a \boxed{b{c}d} e") == r"\boxed{b{c}d}"
    assert remove_boxed(r"\boxed{b{c}d}") == "b{c}d"
    assert remove_boxed("5") is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac12", r"\frac{1}{2}"), (r"\dfrac{3}{4}", r"\tfrac34"), ("1/2", r"\frac{1}{2}"), ("0.5", "1/2"),
        (".25", "0.25"), ("x=7", "7"), (r"50\%", "50"), (r"\$12", "12"), (r"90^\circ", "90"), (r"\text{East}", "East"),
        (r"\left( 3, 4 \right)", "(3,4)"), (r"\sqrt3", r"\sqrt{3}"), (r"12\text{ cm}", "12"), ("1 000", "1000"),
    ],
)  # fmt: skip
def test_texts_of_the_same_answer_are_the_same(one, other):
    assert mathd_normalize_answer(one) == mathd_normalize_answer(other)


GRADES = [
    # the same value, written differently
    ("5", "5", 1), ("5.0", "5", 1), ("1,000", "1000", 1), ("-3", "- 3", 1), (r"\frac{1}{2}", "0.5", 1),
    (r"\frac{1}{2}", "1/2", 1), (r"2\sqrt{3}", r"\sqrt{12}", 1), (r"\sqrt{8}", r"2\sqrt2", 1), ("2x+1", "1+2x", 1),
    ("(x+1)^2", "x^2+2x+1", 1), (r"\frac{x}{2}", "0.5x", 1), (r"3\frac{1}{2}", r"\frac{7}{2}", 1),
    ("(1, 2)", "(1,2)", 1), (r"\left(\frac12, 3\right)", "(0.5,3)", 1), (r"\pi/4", r"\frac{\pi}{4}", 1),
    (r"10\%", "10", 1), (r"30^\circ", "30", 1), ("5 cm", "5", 1), ("7 apples", "7 apples", 1), (r"\text{B}", "B", 1),
    ("2^{10}", "1024", 0), ("east", "East", 1), ("3 \\times 10^2", "300", 0), (r"\frac{\sqrt{2}}{2}", r"1/\sqrt{2}", 1),
    (r"e^{2}", r"e \cdot e", 1), (r"\sin(\pi/6)", "0.5", 1), ("x", "y", 0), ("5!", "120", 0), ("[1,2]", "[1, 2]", 1),
    (r"\frac{2}{3}", "0.6666666666666", 0), ("2 million", "2*10^6", 1), ("½", "1/2", 1),
    (r"\frac{x^2-1}{x-1}", "x+1", 1),
    # other values
    ("6", "5", 0), ("(1,3)", "(1,2)", 0), ("(1,2)", "[1,2]", 0), ("(1,2,3)", "(1,2)", 0), ("0.51", "0.5", 0),
    (r"\sqrt{2}", r"\sqrt{3}", 0), ("x+1", "x+2", 0), ("-5", "5", 0), (r"\frac{2}{4}", r"\frac{1}{2}", 0),
    ("", "5", 0), ("five apples or so", "5 pears", 0), ("__import__('os')", "1", 0), ("9^9^9^9^9", "1", 0),
    ("x^", "1", 0), ("((((", "1", 0), ("1/0", "5", 0), ("sqrt(x^2)", "x", 0), ("10" * 300, "5", 0),
]  # fmt: skip


@pytest.mark.parametrize(("given", "truth", "grade"), GRADES)
def test_grades(given, truth, grade):
    # an integer label wants an integer as the answer: 2^{10}, 5! and 3*10^2 are not evaluated
    assert grade_answer_verl(f"therefore \\boxed{{{given}}}", truth) is bool(grade)


def test_labels_with_a_box_of_their_own_and_numbers():
    assert grade_answer_verl(r"\boxed{4}", r"The answer is \boxed{4}.")
    assert grade_answer_verl(r"\boxed{4}", 4)
    assert grade_answer_verl(r"\boxed{0.5}", 0.5)
    assert not grade_answer_verl(r"\boxed{4}", None)
    assert not grade_answer_verl("4", "4")
    assert grade_answer_sympy("2/3", "2/3")


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", "2", 1),
        (r"<think>\boxed{2}</think> nothing", "2", 0),
        (r"<think>a</think><think>b</think>\boxed{2}", "2", 1),
        (r"###Response \boxed{3}", "3", 1),
        (r"###Response \boxed{3} ###Response \boxed{4}", "3", 0),
        (r"\boxed{3}", "3", 0),
        (r"</think>\boxed{3}", "", 0),
        (r"</think>\boxed{3}", r"\boxed{3}", 1),
        (r"</think>\boxed{3}", 3, 1),
        (r"</think>\boxed{4}", 3, 0),
    ],
)
def test_deepscaler(response, label, reward):
    assert get_deepscaler_rule_based_reward(response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "score", "prediction"),
    [
        ("Answer: 34", "34", 1.0, "34"),
        ("answer : 34.", "34", -1.0, "34."),
        ("Answer: 1\nAnswer: 2", "2", 1.0, "2"),
        ("Answer: $\\boxed{7}$", "7", 1.0, "7"),
        ("Answer: x = 12", "12", 1.0, "12"),
        ("Answer: 1,234", "1234", 1.0, "1234"),
        ("Answer: 15 dollars", "15", 1.0, "15"),
        ("Answer: 5", "5.0", 1.0, "5"),
        ("nothing", "5", -1.0, "[INVALID]"),
        ("Answer: 5" + " " * 300, "5", -1.0, "[INVALID]"),
        ("Answer: \\frac12", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
        ("Answer: (1, 2)", "(1,2)", 1.0, "(1,2)"),
    ],
)
def test_dapo(response, label, score, prediction):
    assert compute_score(response, label) == {"score": score, "acc": score > 0, "pred": prediction}


def test_dapo_strict_box():
    assert compute_score(r"so \boxed{9}", "9", strict_box_verify=True)["acc"] is True
    assert compute_score(r"so \boxed{9}" + "x" * 120, "9", strict_box_verify=True)["acc"] is False
    assert normalize_final_answer("a \\text{m} 3 meters") == "3"


@pytest.mark.parametrize(
    ("given", "truth", "f1"),
    [
        ("the Eiffel Tower", "Eiffel tower!", 1.0),
        ("a b c d", "a b", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # "a" is an article: {b,c,d} against {b}
        ("x y", "y z", 0.5),
        ("yes", "no", 0.0),
        ("yes it is", "yes", 0.0),
        ("yes", "Yes.", 1.0),
        ("", "word", 0.0),
        ("b b b", "b", 0.5),
    ],
)
def test_f1(given, truth, f1):
    assert f1_score(given, truth)[0] == pytest.approx(f1)
    assert f1_score(None, truth) == (0, 0, 0)


def test_f1_normalization():
    assert normalize_answer("  The, quick  (brown) fox an ") == "quick brown fox"


CHOICES = {"choices": ["red", "green", "blue", "dark blue"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("Answer: B", "B", None, 1.0),
        ("The answer is (C).", "C", None, 1.0),
        ("The correct option is D", "B", None, 0.0),
        (r"\boxed{A}", "A", None, 1.0),
        (r"\boxed{\text{A}}", "A", None, 1.0),
        ("<think>Answer: B</think> Answer: A", "A", None, 1.0),
        ("<think>Answer: A</think> Answer: B", "A", None, 0.0),
        ("First A. Final answer: **B**", "B", None, 1.0),
        ("B", "B", None, 1.0),
        ("Answer: B", 1, CHOICES, 1.0),
        ("Answer: B", "green", CHOICES, 1.0),
        ("Answer: A", "green", CHOICES, 0.0),
        ("it is green, I think", "green", CHOICES, 1.0),
        ("it is dark", "green", CHOICES, 0.0),
        ("Answer: Z", "B", None, 0.0),
        ("Answer: E", "E", {"valid_letters": ["A", "B"]}, 0.0),
        ("Answer: b", "A", {**CHOICES, "correct_letter": "B"}, 0.0),
        ("Answer: B", None, {**CHOICES, "correct_letter": "b"}, 1.0),
        ("Answer: C", None, {**CHOICES, "correct_answer": "blue"}, 1.0),
        (None, "A", None, 0.0),
        ("", "A", None, 0.0),
        ("I do not know", "A", None, 0.0),
    ],
)
def test_gpqa(response, label, metadata, reward):
    assert compute_gpqa_reward(response, label, metadata) == reward


def sample(response: str, label: Any = "4", **fields: Any) -> Sample:
    return Sample(index=1, prompt="q", response=response, label=label, **fields)


def args(**fields: Any) -> Namespace:
    return run_args(**fields)


@pytest.mark.parametrize(
    ("rm_type", "response", "reward"),
    [
        ("math", r"\boxed{4}", 1),
        ("math", "4", 0),
        ("math", r"\boxed{2+2}", 0),
        ("deepscaler", r"</think>\boxed{4}", 1),
        ("dapo", "Answer: 4", {"score": 1.0, "acc": True, "pred": "4"}),
        ("f1", "4", 1.0),
        ("boxed_f1", r"the \boxed{4} it is", 1.0),
        ("boxed_f1", "no box", 0.0),
        (" math ", r"\boxed{4}", 1),
    ],
)
async def test_dispatch_by_type(rm_type, response, reward):
    assert await async_rm(args(rm_type=rm_type), sample(response)) == reward


async def test_values_that_no_text_shows_are_right_too():
    given = [(r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1), (r"\boxed{x+1}", "x+2", 0), (r"\boxed{(x+1)^2}", "x^2+2x+1", 1)]
    rewards = await asyncio.gather(*(async_rm(args(rm_type="math"), sample(r, label)) for r, label, _ in given))
    assert rewards == [grade for *_, grade in given]


async def test_random_is_zero_or_one():
    rewards = {await async_rm(args(rm_type="random"), sample("")) for _ in range(50)}
    assert rewards == {0, 1}


@pytest.mark.parametrize("rm_type", [None, "", "boxed_", "nonsense", "boxed_nonsense"])
async def test_unknown_types_are_refused(rm_type):
    with pytest.raises(NotImplementedError, match="--rm-type"):
        await async_rm(args(rm_type=rm_type), sample(""))


async def constant(a: Any, s: Any, **kwargs: Any) -> Any:
    return [9.0] * len(s) if isinstance(s, list) else 9.0


async def other_constant(a: Any, s: Sample, **kwargs: Any) -> float:
    return 8.0


async def test_precedence():
    everything = args(custom_rm_path=f"{HERE}.constant", rm_type="math")
    own = sample("4", custom_rm_path=f"{HERE}.other_constant", metadata={"rm_type": "f1"})
    assert await async_rm(everything, own) == 8.0
    own.custom_rm_path = None
    assert await async_rm(everything, own) == 9.0
    assert await async_rm(args(rm_type="math"), own) == 1.0  # f1 of the metadata
    own.metadata = {}
    assert await async_rm(args(rm_type="math"), own) == 0
    assert await batched_async_rm(everything, [own, own]) == [9.0, 9.0]
    assert await batched_async_rm(args(rm_type="f1"), [own, sample("5")]) == [1.0, 0.0]


async def test_remote_rewards(monkeypatch):
    monkeypatch.setattr(remote, "_client", None)
    with StandInCluster(1) as cluster:
        engine = cluster.engines[0]
        engine.failures.extend([Failure(200, b"0.25"), Failure(400, b"bad label"), Failure(200, b'{"score": 1}')])
        asked = args(rm_type="remote_rm", rm_url=f"{engine.url}/generate")
        assert await async_rm(asked, sample("r", label="l")) == 0.25
        assert engine.requests[0].items() >= {"prompt": "q", "response": "r", "label": "l"}.items()
        with pytest.raises(HttpRequestError, match="bad label"):
            await remote_rm(asked, sample("r"))
        boxed = args(rm_type="boxed_remote_rm", rm_url=f"{engine.url}/generate")
        assert await async_rm(boxed, sample(r"x \boxed{y}")) == {"score": 1}
        assert engine.requests[-1]["response"] == "y"
        await remote.get_client().close()
    with pytest.raises(ValueError, match="--rm-url"):
        await remote_rm(args(rm_url=None), sample(""))


async def test_remote_rewards_are_asked_again_and_fail_alone(monkeypatch):
    for name, value in {"_client": None, "PAUSE_S": 0.0, "ATTEMPTS": 3}.items():
        monkeypatch.setattr(remote, name, value)
    with StandInCluster(1) as cluster:
        engine = cluster.engines[0]
        asked = args(rm_type="remote_rm", rm_url=f"{engine.url}/generate", max_prompt_attempts=1)
        engine.failures.extend([Failure(503, b"busy"), Failure(500, b"no"), Failure(200, b"0.5")])
        assert await async_rm(asked, sample("r")) == 0.5
        assert len(engine.requests) == 3
        errors, unlucky = RewardErrors(), sample("r")
        engine.failures.extend([Failure(503, b"busy")] * 3)
        await errors.score_one(asked, unlucky, async_rm)
        assert unlucky.reward == 0.0
        assert "busy" in unlucky.metadata["reward_error"]
        engine.failures.append(Failure(400, b"bad label"))
        await errors.score_one(asked, unlucky, async_rm)
        assert errors.metrics()["rollout/reward/failures/remote"] == 2
        assert len(engine.requests) == 7
        await remote.get_client().close()


async def test_the_deadline_of_a_remote_reward_begins_when_it_is_sent(monkeypatch):
    """Requests that waited for a connection within their deadline failed before the server had seen them."""
    monkeypatch.setattr(remote, "_client", None)
    monkeypatch.setattr(remote, "CONNECTIONS", 2)
    sent, most = [], 0

    async def post(url: str, payload: Any, **options: Any) -> float:
        nonlocal most
        sent.append(payload["response"])
        most = max(most, len(sent))
        for _ in range(5):
            await asyncio.sleep(0)
        sent.remove(payload["response"])
        return 1.0

    monkeypatch.setattr(remote.get_client(), "post", post)
    asked = args(rm_type="remote_rm", rm_url="http://nowhere")
    assert await batched_async_rm(asked, [sample(str(number)) for number in range(7)]) == [1.0] * 7
    assert most == 2


async def timing_out(a: Any, s: Sample) -> float:
    raise RewardFailure("timeout", "took more than 5 s", "at line 7")


async def fine(a: Any, s: Sample) -> float:
    return 1.0


async def test_a_failed_reward_costs_one_sample_and_many_stop_the_run():
    errors = RewardErrors()
    hung = sample("x")
    await errors.score_one(args(reward_key="score"), hung, timing_out)
    assert hung.reward == {"score": 0.0}
    assert hung.remove_sample
    assert "took more than" in hung.metadata["reward_error"]
    for _ in range(3):
        await errors.score_one(args(), sample("x"), timing_out)
    with pytest.raises(
        RuntimeError, match=r"5 of 5 rewards failed \(5 timeout\), more than the tolerated 10%"
    ) as caught:
        await errors.score_one(args(), sample("x"), timing_out)
    assert "the first: sample index=1: took more than 5 s\nat line 7" in str(caught.value)
    lucky = RewardErrors()
    for _ in range(100):
        await lucky.score_one(args(), sample("x"), fine)
    for _ in range(10):
        await lucky.score_one(args(), sample("x"), timing_out)
    assert lucky.metrics()["rollout/reward/failures"] == 10


async def failing_in_two_ways(a: Any, s: Sample) -> float:
    if s.index % 5 == 0:
        raise KeyError("no such column")
    raise ValueError(f"no number in the response {s.index}")


async def test_failures_of_one_cause_share_a_line_after_the_first_three(caplog):
    errors = RewardErrors()
    given = args(reward_failure_tolerance=1.0)
    for index in range(30):
        await errors.score_one(given, Sample(index=index, response="x"), failing_in_two_ways)
    assert [int(re.findall(r"sample index=(\d+),", line)[0]) for line in caplog.messages] == [0, 1, 2, 3, 5, 10]
    caplog.clear()
    assert errors.metrics()["rollout/reward/failures/raised"] == 30
    columns, numbers = caplog.messages
    assert "no reward for 3 more samples for the same reason as for sample index=0," in columns
    assert columns.endswith("[15, 20, 25]")
    assert "no reward for 21 more samples for the same reason as for sample index=1," in numbers
    assert numbers.endswith("28] ...")  # the first twenty
    caplog.clear()
    errors.metrics()
    assert caplog.messages == []
    errors.count_anew()
    await errors.score_one(given, Sample(index=30, response="x"), failing_in_two_ways)
    assert len(caplog.messages) == 1  # the next rollout names its first failures again


async def test_a_run_that_stops_names_all_failed_samples_though_few_are_logged(caplog):
    errors = RewardErrors()
    samples = [Sample(index=index, response="x") for index in range(16)]
    results = await asyncio.gather(
        *(errors.score_one(args(), sample, timing_out) for sample in samples), return_exceptions=True
    )
    assert len(caplog.messages) == 3
    assert [sample.index for sample in samples if sample.remove_sample] == list(range(16))
    assert "16 of 16 rewards failed (16 timeout)" in str(results[-1])
    assert str(list(range(16))) in str(results[-1])


@pytest.mark.parametrize(("tolerance", "tolerated"), [(0.0, 0), (0.02, 4), (0.25, 25)])
async def test_the_tolerated_share_is_a_flag(tolerance, tolerated):
    errors = RewardErrors()
    given = args(reward_failure_tolerance=tolerance)
    for _ in range(100 - tolerated):
        await errors.score_one(given, sample("x"), fine)
    for _ in range(tolerated):
        await errors.score_one(given, sample("x"), timing_out)
    with pytest.raises(RuntimeError, match="--reward-failure-tolerance"):
        await errors.score_one(given, sample("x"), timing_out)


async def failing_for_three(a: Any, s: Sample) -> float:
    if s.index == 3:
        raise KeyError("no such column")
    return float(s.index or 0)


async def test_a_custom_reward_that_raises_costs_its_sample_too():
    errors = RewardErrors()
    samples = [Sample(index=n, response="x") for n in range(8)]
    for one in samples:
        await errors.score_one(args(), one, failing_for_three)
    assert [s.reward for s in samples] == [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0]
    assert [s.index for s in samples if s.remove_sample] == [3]
    assert "no such column" in samples[3].metadata["reward_error"]
    strict = RewardErrors()
    own_lines = r"sample index=3(.|\n)*test_rewards\.py(.|\n)*failing_for_three(.|\n)*no such column"
    with pytest.raises(RuntimeError, match=own_lines) as caught:
        await strict.score_one(args(reward_failure_tolerance=0), samples[3], failing_for_three)
    assert "rm_hub" not in str(caught.value)


async def test_metrics_say_what_failed_and_how_long_rewards_took():
    errors = RewardErrors()
    assert errors.metrics() == {}
    await errors.score_one(args(rm_type="f1"), sample("4"), async_rm)
    await errors.score_one(args(rm_type="math"), sample(r"\boxed{4}"), async_rm)
    await errors.score_one(args(custom_rm_path=f"{HERE}.fine"), sample("4"), timing_out)
    found = errors.metrics("eval/")
    assert undocumented([*found, *errors.metrics()]) == []
    assert found["eval/reward/failures"] == found["eval/reward/failures/timeout"] == 1
    for kind in ("f1", "math", "custom"):
        assert 0 < found[f"eval/reward/latency/{kind}/mean"] <= found[f"eval/reward/latency/{kind}/p99"] < 60
    errors.latencies = {"f1": [float(n) for n in range(200, 0, -1)]}
    assert errors.metrics()["rollout/reward/latency/f1/p99"] == 198
    assert errors.metrics()["rollout/reward/latency/f1/mean"] == 100.5


async def too_few(a: Any, s: list[Sample]) -> list[float]:
    return [1.0]


async def never(a: Any, s: Sample) -> float:
    await asyncio.sleep(60)
    return 1.0


async def test_custom_rewards_must_answer_in_time_and_for_all():
    with pytest.raises(ValueError, match=r"given 2 samples \(indices \[1, 1\]\)"):
        await RewardErrors().score_batch(args(custom_rm_path=f"{HERE}.too_few"), [sample("a"), sample("b")], too_few)
    late = sample("a")
    await RewardErrors().score_one(args(rollout_request_timeout=0.1), late, never)
    assert "the reward of samples [1] took more than 0.1 s (--reward-timeout)" in late.metadata["reward_error"]


async def test_a_reward_has_a_deadline_of_its_own():
    late = sample("a")
    await RewardErrors().score_one(args(rollout_request_timeout=60.0, reward_timeout=0.1), late, never)
    assert "took more than 0.1 s (--reward-timeout)" in late.metadata["reward_error"]


@pytest.mark.parametrize(("path", "error"), [("no.such.module", ImportError), (f"{HERE}.no_such", AttributeError)])
async def test_a_reward_that_cannot_be_loaded_stops_the_run_at_once(path, error):
    with pytest.raises(error, match="--custom-rm-path"):
        await RewardErrors().score_one(args(custom_rm_path=path), sample("a"), async_rm)
    with pytest.raises(NotImplementedError, match="--rm-type"):
        await RewardErrors().score_one(args(rm_type="nonsense"), sample("a"), async_rm)


async def by_length(a: Any, s: Any, **kwargs: Any) -> Any:
    return [float(len(one.response)) for one in s]


async def test_a_sample_s_own_reward_wins_over_that_of_the_run_in_batches_too():
    run_wide = args(custom_rm_path=f"{HERE}.by_length")
    own = {"custom_rm_path": f"{HERE}.other_constant"}
    samples = [sample("a"), sample("bb", **own), sample("ccc"), sample("dddd", **own)]
    assert await batched_async_rm(run_wide, samples) == [1.0, 8.0, 3.0, 8.0]
    assert await batched_async_rm(run_wide, samples[1:2]) == [8.0]
    await RewardErrors().score_batch(run_wide, samples, batched_async_rm)
    assert [s.reward for s in samples] == [1.0, 8.0, 3.0, 8.0]


finished: list[int | None] = []


async def first_fails(a: Any, s: Sample, **kwargs: Any) -> float:
    await asyncio.sleep(0.01 if s.index == 0 else 0.1)
    if s.index == 0:
        raise KeyError("the first")
    finished.append(s.index)
    return 1.0


async def test_the_first_failure_of_a_batch_leaves_nothing_running():
    finished.clear()
    samples = [Sample(index=n, custom_rm_path=f"{HERE}.first_fails") for n in range(4)]
    with pytest.raises(KeyError):
        await batched_async_rm(args(), samples)
    with pytest.raises(RuntimeError, match="1 of 4 rewards failed"):
        await RewardErrors().score_batch(args(reward_failure_tolerance=0), samples, batched_async_rm)
    await asyncio.sleep(0.15)
    assert finished == []


def test_workers_serve_the_background_loop_that_rollouts_use():
    assert run(async_rm(args(rm_type="math"), sample(r"\boxed{2\sqrt{2}}", r"\sqrt{8}"))) == 1
