"""Executions with experts that follow rules: masks, features, rewards by a formula, and services that fail."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from examples.retool.interpreter import close_workers
from examples.search_r1.make_data import document, facts
from examples.search_r1.retrieval_server import Index
from examples.search_r1.retrieval_server import application as search_engine
from examples.tool_orchestra import experts, questions, rollout
from examples.tool_orchestra.expert_server import PRICING, application, reply
from examples.tool_orchestra.func_calls import FunctionCalls
from examples.tool_orchestra.make_data import MODELS, PREFERENCES, call, make_data, problem
from examples.tool_orchestra.reward import clipped_advantages, is_varied, preference_reward
from examples.tool_orchestra.rollout import KEY, generate, log_evaluation, log_executions, shortened
from examples.tool_orchestra.settings import Settings, Task
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.support.agents import END, ToolTokenizer
from tests.support.arguments import run_args
from tests.support.episodes import player, trained

EASY, HARD = list(facts().items())[:2]
"""The places 0 and 1."""


def sample(preference: str, number: int, **fields: Any) -> Sample:
    place, thing = (EASY, HARD)[number]
    metadata = {"category": "qa", "model_mapping": MODELS, "tool_pricing": PRICING,
                "pref_vec": PREFERENCES[preference], **fields}  # fmt: skip
    asked = [{"role": "user", "content": problem(preference, place, number)}]
    return Sample(index=5, group_index=2, prompt=asked, label=thing, metadata=metadata)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """``start(**settings)``: ``play(model, sample, evaluation)`` with a search engine and experts."""
    with ExitStack() as stack:
        ports = []
        for app in (search_engine(Index([document(*fact) for fact in facts().items()])), application(facts())):
            handle = run_app_in_thread(app, host="127.0.0.1")
            stack.callback(handle.stop)
            ports.append(handle.port)

        def make(**changes: Any) -> Any:
            given = {"retrieval": f"http://127.0.0.1:{ports[0]}/retrieve", "topk": 1, "system": "", "max_turns": 3}
            urls = dict.fromkeys(PRICING, f"http://127.0.0.1:{ports[1]}")
            custom = {"tool_orchestra": {**given, "urls": urls, **changes}}
            return stack.enter_context(player(generate, custom))

        yield make


class Plan:
    """Says its lines in turn, and keeps what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.asked = list(lines), []

    def __call__(self, turns: list[str]) -> str:
        self.asked.append(turns[-2])
        return self.lines[len(self.asked) - 1]


def test_every_turn_is_a_sample_of_what_the_orchestrator_wrote(start):
    plan = Plan(call("search-1"), call("answer-1"))
    found = start()(plan, sample("cheap", 1))
    place, thing = HARD
    assert plan.asked == [f"cheap hard {place}", f'cheap hard {place}\n\nDocuments:\n"{place}"\n{place} has {thing}']
    assert [trained(one) for one in found] == [line + END for line in plan.lines]
    for one in found:
        assert one.response == trained(one)  # no token of an expert is in the response at all
        assert len(one.rollout_log_probs) == one.response_length
        assert (one.rollout_id, one.index, one.group_index, one.reward) == (5, 5, 2, None)
        assert not one.remove_sample
        assert one.metadata[KEY]["features"] == {
            "answer-1": 1.0, "answer-2": 0.0, "answer-3": 0.0, "search-1": 1.0, "accuracy": 1.0, "cost": -2.0,
            "latency": -4.0,
        }  # fmt: skip
    assert [one.metadata["turn"] for one in found] == [0, 1]


def test_both_layouts_train_on_the_same_tokens(start):
    lines = ["no call", call("search-1"), call("answer-1")]
    turns = start()(Plan(*lines), sample("cheap", 1))
    [whole] = start(layout="sequence")(Plan(*lines), sample("cheap", 1))
    assert trained(whole) == "".join(trained(one) for one in turns[1:]) == "".join(line + END for line in lines[1:])
    place, thing = HARD
    assert f'Documents:\n"{place}"\n{place} has {thing}{END}' in whole.response
    log_probs = [p for p, mask in zip(whole.rollout_log_probs, whole.loss_mask, strict=True) if mask]
    assert log_probs == [p for one in turns[1:] for p in one.rollout_log_probs]
    assert whole.metadata[KEY] == turns[0].metadata[KEY]
    assert (whole.rollout_id, whole.remove_sample, whole.metadata[KEY]["turns"]) == (5, False, 3)


@pytest.mark.parametrize(
    ("alias", "number", "correct", "cost", "latency"),
    [("answer-1", 0, True, 1, 2), ("answer-1", 1, False, 1, 2), ("answer-2", 1, True, 10, 1),
     ("answer-3", 1, True, 3, 10)],
)  # fmt: skip
def test_what_experts_know_and_cost(start, alias, number, correct, cost, latency):
    [one] = start()(Plan(call(alias)), sample("fast", number))
    features = one.metadata[KEY]["features"]
    assert (features["accuracy"], -features["cost"], -features["latency"]) == (float(correct), cost, latency)


def test_turns_that_are_no_call_and_executions_without_an_answer_are_out_of_the_loss(start):
    play = start()
    bad = [call("expert-9"), '<tool_call>{"name": "answer"</tool_call>', "the answer is 4"]
    for text in bad:
        first, second = play(Plan(text, call("answer-2")), sample("fast", 1))
        assert (first.remove_sample, second.remove_sample) == (True, False)
    unanswered = play(Plan(*bad), sample("fast", 1))
    assert [one.remove_sample for one in unanswered] == [True] * 3
    assert not any(
        one.remove_sample for one in play(Plan(f"<think>{call('x-1')}</think>" + call("answer-2")), sample("fast", 1))
    )


def test_an_evaluation_is_one_sample_with_the_outcome(start):
    play = start()
    right = play(Plan(call("search-1"), call("answer-1")), sample("cheap", 1), evaluation=True)
    wrong = play(Plan(call("answer-1")), sample("cheap", 1), evaluation=True)
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_an_evaluation_counts_what_is_within_the_budget(start):
    def rewards(*calls: str) -> list[float]:
        budgets = ({}, {"cost": 2.0}, {"latency": 2.0}, {"cost": 10.0, "latency": 1.0})
        return [start()(Plan(*calls), sample("cheap", 1, budget=most), evaluation=True).reward for most in budgets]

    assert rewards(call("search-1"), call("answer-1")) == [1.0, 1.0, 0.0, 0.0]  # 2, in 4 s
    assert rewards(call("answer-2")) == [1.0, 0.0, 1.0, 1.0]  # 10, in 1 s
    assert rewards(call("answer-1")) == [0.0] * 4  # wrong


@pytest.mark.parametrize("what", ["retrieval", "urls"])
def test_a_service_that_fails_aborts_without_a_reward(start, what, monkeypatch):
    monkeypatch.setattr(experts, "RETRIES", 1)
    dead = "http://127.0.0.1:9"
    play = start(**{what: dead if what == "retrieval" else dict.fromkeys(PRICING, dead)})
    lost = play(Plan(call("search-1"), call("answer-2")), sample("fast", 1))
    assert (lost.status, lost.reward) == (Sample.Status.ABORTED, None)
    assert lost.metadata["abort_reason"].startswith(
        f"service: {'retrieval' if what == 'retrieval' else 'cheap'} at {dead}"
    )


def test_an_execution_that_takes_too_long_is_aborted(start):
    lost = start(execution_s=0.0)(Plan(call("answer-2")), sample("fast", 1))
    assert lost.status == Sample.Status.ABORTED
    assert "more than 0 s" in lost.metadata["abort_reason"]


def test_a_model_that_no_server_has_is_an_error(start):
    with pytest.raises(ValueError, match="no model 'dear' is served"):
        start(urls={})(Plan(call("answer-2")), sample("fast", 1))
    with pytest.raises(ValueError, match="needs func_call_domain"):
        start()(Plan(call("answer-2")), sample("fast", 1, category="func_call"))


def test_programs_and_the_judge(start, monkeypatch):
    said = {"search query": "x", "Python program": "```python\nprint(6 * 7)\n```", "Say yes or no": "Yes."}
    monkeypatch.setattr(
        "examples.tool_orchestra.expert_server.reply",
        lambda model, text, known: next((line for part, line in said.items() if part in text), "it is 42"),
    )
    reasoner = {"model_mapping": {**MODELS, "reasoner-1": "slow"}}
    compute = '<tool_call>{"name": "enhance_reasoning", "arguments": {"model": "reasoner-1"}}</tool_call>'
    plan = Plan(compute, call("answer-1"))
    try:
        found = start(judge="dear")(plan, sample("cheap", 1, **reasoner))
    finally:
        close_workers()
    assert plan.asked[1].endswith("Program:\nprint(6 * 7)\n\nIts output:\n42")
    about = found[0].metadata[KEY]
    assert (about["correct"], about["calls"]) == (True, {"reasoner-1": 1, "answer-1": 1})  # the judge is not charged
    said["Say yes or no"] = "no"
    assert not start(judge="dear")(Plan(call("answer-1")), sample("cheap", 1))[0].metadata[KEY]["correct"]


def brute_force(executions: list[dict[str, Any]], preferences: dict[str, float]) -> list[float]:
    """The formula: sum over f of p_f (x_f - min_f) / (max_f - min_f) of those with a span; 0 when wrong."""
    rewards = []
    for one in executions:
        total = 0.0
        for name, weight in preferences.items():
            values = [other["features"][name] for other in executions]
            if max(values) > min(values):
                total += weight * (one["features"][name] - min(values)) / (max(values) - min(values))
        rewards.append(total if one["correct"] else 0.0)
    return rewards


GRPO = run_args(advantage_estimator="grpo", reward_statistics="trajectories", grpo_std_normalization=True)


def group_of(executions: list[dict[str, Any]], turns: list[int]) -> list[list[Sample]]:
    return [
        [Sample(index=i, rollout_id=i, group_index=0, metadata={KEY: one}) for _ in range(turns[i])]
        for i, one in enumerate(executions)
    ]


def test_rewards_and_advantages_are_those_of_the_formula_with_unequal_numbers_of_turns():
    rng = random.Random(0)
    preferences = {"accuracy": 1.0, "cost": 0.7, "latency": 0.3, "search-1": -0.2, "answer-2": 0.5}
    executions = []
    for _ in range(8):
        correct = rng.random() < 0.7
        features = {"accuracy": float(correct), "cost": -rng.random(), "latency": -rng.random() * 9,
                    "search-1": float(rng.randint(0, 3)), "answer-2": 1.0}  # fmt: skip
        executions.append({"features": features, "preferences": preferences, "correct": correct})
    turns = [rng.randint(1, 6) for _ in executions]
    group = group_of(executions, turns)
    asyncio.run(preference_reward(SimpleNamespace(), group))
    wanted = brute_force(executions, preferences)
    for samples, reward in zip(group, wanted, strict=True):
        assert [one.reward for one in samples] == pytest.approx([reward] * len(samples), abs=1e-6)
    flat = [one for samples in group for one in samples]
    raw, advantages = clipped_advantages(GRPO, flat)
    mean, std = statistics.fmean(wanted), statistics.stdev(wanted)
    expected = [
        (reward - mean) / (std + 1e-6) for reward, count in zip(wanted, turns, strict=True) for _ in range(count)
    ]
    assert advantages == pytest.approx(expected, abs=1e-6)
    assert raw == pytest.approx([r for r, count in zip(wanted, turns, strict=True) for _ in range(count)], abs=1e-6)
    assert is_varied(SimpleNamespace(), group).keep


def test_groups_that_are_all_wrong_and_advantages_that_are_clipped():
    wrong = {
        "features": {"accuracy": 0.0, "cost": -1.0},
        "preferences": {"accuracy": 1.0, "cost": 1.0},
        "correct": False,
    }
    right = {
        "features": {"accuracy": 1.0, "cost": -1.0},
        "preferences": {"accuracy": 1.0, "cost": 1.0},
        "correct": True,
    }
    group = group_of([wrong] * 4, [1, 2, 1, 1])
    asyncio.run(preference_reward(SimpleNamespace(), group))
    assert {one.reward for samples in group for one in samples} == {0.0}
    dropped = is_varied(SimpleNamespace(), group)
    assert (dropped.keep, dropped.reason) == (False, "little_spread")
    group = group_of([right] + [wrong] * 15, [1] * 16)  # (n - 1) / sqrt(n) = 3.75
    asyncio.run(preference_reward(SimpleNamespace(), group))
    flat = [one for samples in group for one in samples]
    advantages = clipped_advantages(GRPO, flat)[1]
    assert advantages[0] == 3.0
    assert advantages[1] == pytest.approx(-1 / math.sqrt(16), rel=1e-3)


class Shop:
    """A domain of one tool: the user sees what is bought, and leaves at the word bye, or when shown the door."""

    closed = 0

    def __init__(self, args: Any, sample: Sample) -> None:
        self.tools = [{"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}}]
        self.bought: list[str] = []

    async def reset(self) -> str:
        return "Policy: sell lamps.\nThe user said:\na lamp, please"

    async def call(self, name: str, arguments: dict[str, Any]) -> str | None:
        self.bought.append(arguments["what"])
        return None if arguments["what"] == "door" else "done"

    async def say(self, text: str) -> str | None:
        return None if text == "bye" else "thanks"

    async def reward(self) -> float:
        return float(self.bought == ["lamp"])

    async def close(self) -> None:
        Shop.closed += 1


class Broken(Shop):
    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise RuntimeError("no database")


def func_call(text: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': text, 'arguments': arguments})}</tool_call>"


def test_function_calls_of_a_domain(start, monkeypatch):
    monkeypatch.setattr(Shop, "closed", 0)
    play = start(func_call_domain=f"{__name__}.Shop", max_turns=1, func_call_turns=5)
    plan = Plan(func_call("buy", what="lamp"), "<message>here it is</message>", "hm", "<message>bye</message>")
    found = play(plan, sample("fast", 1, category="func_call"))
    assert (
        'Called buy {"what": "lamp"}:\ndone\n\nSaid to the user:\nhere it is\n\nThe user said:\nthanks' in plan.asked[3]
    )
    assert [one.remove_sample for one in found] == [False, False, True, False]
    assert found[0].metadata[KEY]["correct"]
    assert "say something to the user in <message> and </message>" in plan.asked[0]
    shown = play(
        Plan(func_call("buy", what="lamp"), func_call("buy", what="door")), sample("fast", 1, category="func_call")
    )
    assert (shown[0].metadata[KEY]["answered"], shown[0].metadata[KEY]["correct"]) == (True, False)
    cut = play(Plan(*["<message>no</message>"] * 5), sample("fast", 1, category="func_call"))
    assert [one.remove_sample for one in cut] == [True] * 5
    lost = start(func_call_domain=f"{__name__}.Broken")(
        Plan(func_call("buy", what="x")), sample("fast", 1, category="func_call")
    )
    assert lost.metadata["abort_reason"] == "service: the domain: RuntimeError('no database')"
    assert Shop.closed == 4


async def test_an_expert_may_choose_the_action():
    calls = [{"function": {"name": "buy", "arguments": '{"what": "lamp"}'}}]
    task = Task("", "func_call", {"expert-1": "dear"}, PRICING, {})
    execution = FunctionCalls(SimpleNamespace(), Settings(system=""), task, Shop(None, Sample()))
    await execution.begin()
    messages = iter([{"tool_calls": calls}, {"content": "bye"}])

    async def ask(alias: str, given: list[dict[str, Any]], tools: list[Any]) -> Any:
        assert (alias, tools) == ("expert-1", execution.domain.tools)
        return next(messages)

    execution.experts.ask = ask
    names = [tool["function"]["name"] for tool in execution.prompt()[1]]
    assert names == ["call_expert", "buy"]
    for _ in range(2):
        assert await execution.step(func_call("call_expert", model="expert-1"))
    assert (execution.answered, execution.correct) == (True, True)


def test_tools_tell_what_models_cost():
    task = Task(
        "", "qa", {"answer-1": "m", "answer-math-1": "n", "search-1": "m"}, {"m": {"input": 0.2, "latency": 3}}, {}
    )
    found = {one["function"]["name"]: one["function"] for one in questions.schemas(task, questions.PURPOSES)}
    assert "answer-1: 0.2 per million input tokens, 3 s\nanswer-math-1: free" in found["answer"]["description"]
    assert found["answer"]["parameters"]["properties"]["model"]["enum"] == ["answer-1", "answer-math-1"]
    assert found["search"]["parameters"]["properties"]["model"]["enum"] == ["search-1"]


def test_what_is_known_is_cut():
    assert shortened(ToolTokenizer(), "abc", 3) == "abc"
    assert shortened(ToolTokenizer(), "abcd", 3) == "abc"


def test_metrics(monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(rollout, "log", lambda args, metrics, step: logged.append(metrics))
    features = {"accuracy": 1.0, "cost": -2.0, "latency": -4.0}
    one = {"turns": 2, "features": features, "calls": {"search-1": 1}}
    other = {"turns": 1, "features": {**features, "accuracy": 0.0, "cost": -1.0}, "calls": {}}
    samples = [Sample(rollout_id=i, metadata={KEY: about}) for i, about in ((0, one), (0, one), (1, other))]
    assert log_executions(3, None, samples, {}, 1.0) is False
    assert logged[0] == {
        "rollout/orchestra/turns": 1.5, "rollout/orchestra/accuracy": 0.5, "rollout/orchestra/cost": 1.5,
        "rollout/orchestra/latency": 4.0, "rollout/orchestra/calls/search-1": 0.5, "rollout/step": 3,
    }  # fmt: skip
    assert log_evaluation(3, None, {"cheap": {"samples": samples[:1]}}, None) is False
    assert logged[1]["eval/cheap/cost"] == 2.0


def test_the_experts():
    place, thing = HARD
    assert reply("cheap", f"x hard {place}", facts()) == "<answer>unknown</answer>"
    assert reply("cheap", f"x easy {place}", facts()) == f"<answer>{thing}</answer>"
    assert reply("dear", "nothing", facts()) == "unknown"


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=600)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    places = {
        name: {row["messages"][0]["content"].split()[2] for row in rows[name]}
        for name in ("sft", "train", "cheap", "fast")
    }
    assert places["cheap"] == places["fast"]
    assert not places["cheap"] & (places["sft"] | places["train"])
    known = facts()
    for row in rows["train"][:50]:
        preference, kind, place = row["messages"][0]["content"].split()
        assert row["metadata"]["pref_vec"] == PREFERENCES[preference]
        assert row["label"] == known[place]
        assert kind == ("easy" if list(known).index(place) % 3 == 0 else "hard")
