"""The flow, its masks, rewards, failures and loss, against an engine and models that answer by functions."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aiohttp import web

from examples.agentflow import flow as flow_module
from examples.agentflow import rollout
from examples.agentflow.flow import Plan, arguments_of, parse_plan
from examples.agentflow.make_data import make_data
from examples.agentflow.prompts import PROMPTS
from examples.agentflow.rollout import eval_log, generate, reward_func, rollout_log
from examples.agentflow.run import EXAMPLE
from examples.agentflow.services import Settings
from examples.agentflow.small_world import KINDS, PEOPLE, answer_to, application, plan_for, ruled
from examples.agentflow.tools import AgentTool, PythonCoder, WikipediaSearch, code_block
from examples.retool.interpreter import close_workers
from examples.search_r1.retrieval_server import Index
from examples.search_r1.retrieval_server import application as retrieval
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.environments import ToolError
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END
from tests.support.episodes import player, trained
from tests.unit.backends.megatron_utils import test_agent_losses as losses
from tests.unit.backends.megatron_utils.test_agent_losses import divisions, make_args, of_the_step, token_losses
from tests.unit.backends.megatron_utils.test_loss import VOCAB

WORLD = {
    "agentflow_tools": [f"examples.agentflow.small_world.{name}" for name in ("Value", "Friend", "Next")],
    "agentflow_planner_tokens": 40,
    "agentflow_judge": None,
    "agentflow_model_attempts": 1,
    "agentflow_prompts": {
        "step": "{tool_name}={result}",
        "analysis": "analyze|{query}|",
        "planner": "{query}\n{steps}",
        "executor": "execute|{query}|{steps}",
        "verifier": "verify|{query}|{steps}",
        "final": "answer|{query}|{steps}",
    },
}
NAME = next(iter(PEOPLE))


def serve(app: web.Application) -> Iterator[str]:
    handle = run_app_in_thread(app, host="127.0.0.1")
    yield f"http://127.0.0.1:{handle.port}"
    handle.stop()


@pytest.fixture(scope="module")
def world() -> Iterator[dict[str, Any]]:
    """The settings of the small world, with the server of its rules."""
    for url in serve(application((f"{BEGIN}user\n", END))):
        yield {**WORLD, "agentflow_urls": {"executor": f"{url}/generate"}}


def answering(function: Callable[[str], Any]) -> web.Application:
    """A model that answers by a function of the whole prompt."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(function((await request.json())["text"]))

    app = web.Application()
    app.router.add_post("/generate", answer)
    return app


def sample(query: str = f"value friend {NAME}", index: int = 5, label: str | None = None) -> Sample:
    label = answer_to(query) if label is None else label
    return Sample(
        index=index, group_index=2, prompt=[{"role": "user", "content": query}], label=label, metadata={"row": 1}
    )


def plans(turns: list[str]) -> str:
    query, *steps = turns[0].splitlines()
    return f"Tool Name: {plan_for(query)[len(steps)]}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_of_the_planner_is_a_sample(world, kind):
    query = f"{kind} {NAME}"
    with player(generate, world) as play:
        samples = play(plans, sample(query))
    assert len(samples) == len(plan_for(query))
    steps, prompts = [], []
    for number, tool in enumerate(plan_for(query)):
        prompts.append(f"{BEGIN}user\n{query}\n" + "\n".join(steps) + f"{END}{BEGIN}assistant\n")
        one = samples[number]
        assert "".join(map(chr, one.tokens[: len(one.tokens) - one.response_length])) == prompts[-1]
        assert trained(one) == one.response == f"Tool Name: {tool}{END}"
        assert one.loss_mask == [1] * one.response_length
        assert len(one.rollout_log_probs) == one.response_length
        assert (one.rollout_id, one.index, one.group_index, one.label) == (5, 5, 2, answer_to(query))
        steps.append(f"{tool}={answer_to(' '.join([*plan_for(query)[: number + 1][::-1], NAME]))}")
    outcome = {"right": True, "steps": len(samples), "tool_errors": 0}
    assert all(one.metadata == {"row": 1, "agent": "planner", **outcome} for one in samples)
    assert run(reward_func(None, samples)) == [1.0] * len(samples)


def test_what_the_planner_does_wrong_is_a_step(world):
    """An unknown tool, then one that refuses its argument; then there are no more steps."""
    with player(generate, world) as play:
        samples = play(lambda turns: ["Tool Name: fly", "Tool Name: next", "no"][turns[0].count("=")], sample())
    assert len(samples) == 3
    last = "".join(map(chr, samples[-1].tokens))
    assert "fly=error: there is no tool 'fly'; the tools are value, friend, next\nnext=error: not a number" in last
    assert samples[0].metadata["tool_errors"] == samples[0].metadata["steps"] == 3
    assert run(reward_func(None, samples)) == [0.0] * 3


def test_an_evaluation_returns_one_sample(world):
    with player(generate, world) as play:
        found = play(plans, sample(), evaluation=True)
    assert isinstance(found, Sample)
    assert run(reward_func(None, found)) == 1.0


def test_the_analysis_can_be_trained(world):
    with player(generate, {**world, "agentflow_train_analysis": True}) as play:
        samples = play(lambda turns: "think" if turns[0].startswith("analyze") else plans(turns), sample())
    assert [one.metadata["agent"] for one in samples] == ["analysis", "planner", "planner"]
    assert trained(samples[0]) == f"think{END}"


# Failures of services


def test_a_model_that_is_gone_aborts_the_execution(world):
    gone = {**world, "agentflow_urls": {"executor": "http://127.0.0.1:9/generate"}}
    drawn = sample()
    with player(generate, gone) as play:
        lost = play(plans, drawn)
        assert lost is drawn
        assert (lost.status, lost.reward, lost.response_length) == (Sample.Status.ABORTED, None, 0)
        assert lost.metadata["abort_reason"] == "service.executor"
        assert "127.0.0.1:9" in lost.metadata["abort_error"]
        with pytest.raises(rollout.ServiceFailure, match="executor"):
            play(plans, sample(), evaluation=True)


@pytest.mark.parametrize("reply", [{"no": "text"}, [], {"text": None}])
def test_a_model_that_answers_nonsense_aborts_the_execution(world, reply):
    for url in serve(answering(lambda text: reply)):
        with player(generate, {**world, "agentflow_urls": {"executor": f"{url}/generate"}}) as play:
            lost = play(plans, sample())
    assert lost.status == Sample.Status.ABORTED
    assert lost.metadata["abort_reason"] == "service.executor"


class Broken(AgentTool):
    name = "value"
    description = "does not work"

    async def execute(self, key: str) -> str:  # type: ignore[override]
        raise OSError("disk on fire")


class Slow(Broken):
    async def execute(self, key: str) -> str:  # type: ignore[override]
        await asyncio.sleep(30)
        return ""


@pytest.mark.parametrize(("tool", "said"), [("Broken", "disk on fire"), ("Slow", "took more than 0.05 s")])
def test_a_tool_that_fails_aborts_the_execution(world, tool, said):
    settings = {**world, "agentflow_tools": [f"{__name__}.{tool}"], "agentflow_tool_timeout": 0.05}
    with player(generate, settings) as play:
        lost = play(plans, sample(f"value {NAME}"))
    assert (lost.status, lost.reward) == (Sample.Status.ABORTED, None)
    assert lost.metadata["abort_reason"] == "service.value"
    assert said in lost.metadata["abort_error"]


def test_an_execution_begins_again_in_an_evaluation(world, monkeypatch):
    real, asked = flow_module.Models.ask, []

    async def failing_once(self, model, prompt, **fields):
        asked.append(prompt)
        if prompt == "verifier" and asked.count("verifier") == 1:
            raise rollout.ServiceFailure(model, "once")
        return await real(self, model, prompt, **fields)

    monkeypatch.setattr(flow_module.Models, "ask", failing_once)
    with player(generate, world) as play:
        assert play(plans, sample(), evaluation=True).metadata["right"]
    assert asked.count("analysis") == 2


def test_an_abort_of_the_policy_takes_the_execution_back(world, monkeypatch):
    async def aborted(args, one, params, evaluation=False):
        one.status = Sample.Status.ABORTED
        return one

    monkeypatch.setattr(flow_module.sglang_rollout, "generate", aborted)
    drawn = sample()
    with player(generate, world) as play:
        assert play(plans, drawn) is drawn
    assert drawn.status == Sample.Status.ABORTED
    assert drawn.metadata == {"row": 1}


# Prompts, models and tools


def test_every_prompt_is_the_users(monkeypatch):
    """A whole execution asks each text that the file has; a text that nothing asks is refused."""
    asked: dict[str, str] = {}
    own = {name: f"{name}!" for name in PROMPTS} | {"tool": "tool! {name}", "step": "step! {result}"}
    own |= {"planner": "planner! {tools} {steps}", "base_generator": "base_generator! {query}"}

    def answer(text: str) -> dict[str, str]:
        name = text.partition("user\n")[2].partition("!")[0]
        asked[name] = text
        replies = {
            "executor": 'execution = tool.execute(query="q")', "python_coder": "```python\nprint(6 * 7)\n```",
            "verifier": "Conclusion: CONTINUE", "final": "<answer>forty-two</answer>", "judge": "VERDICT: True",
        }  # fmt: skip
        return {"text": replies.get(name, "said")}

    def planner(turns: list[str]) -> str:
        return "Tool Name: Python Coder" if "step!" in turns[0] else "Sub-Goal: s\nTool Name: base_generator"

    for url in serve(answering(answer)):
        urls = {"executor": f"{url}/generate", "coder": f"{url}/generate"}
        settings = {"agentflow_urls": urls, "agentflow_prompts": own, "agentflow_max_steps": 2}
        with player(generate, settings) as play:
            samples = play(planner, sample("what?", label="42"))
    close_workers()
    assert {*asked} == {*PROMPTS} - {"tool", "step", "planner"}
    assert "base_generator! q" in asked["base_generator"]
    prompts = ["".join(map(chr, one.tokens)) for one in samples]
    assert all("planner! tool! base_generator\ntool! python_coder" in text for text in prompts)
    assert "step! said" in prompts[1]
    assert [one.metadata["right"] for one in samples] == [True, True]
    with (
        player(generate, {"agentflow_prompts": {"coder": "x"}}) as play,
        pytest.raises(ValueError, match="prompts: coder"),
    ):
        play(planner, sample("what?", label="42"))


def test_a_judge_that_fails_aborts_and_one_that_says_no_is_heeded(world):
    verdicts = {"text": "It is VERDICT: True. No, VERDICT: False"}
    for url in serve(answering(lambda text: verdicts)):
        judged = {**world, "agentflow_judge": "judge"}
        judged["agentflow_urls"] = {**world["agentflow_urls"], "judge": f"{url}/generate"}
        with player(generate, judged) as play:
            wrong = play(plans, sample(label="nothing"))
            verdicts.clear()
            lost = play(plans, sample(label="nothing"))
            right = play(plans, sample())  # literally, without the judge
    assert run(reward_func(None, wrong)) == [0.0, 0.0]
    assert lost.metadata["abort_reason"] == "service.judge"
    assert run(reward_func(None, right)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("said", "label", "right"),
    [
        ("It is <answer>1</answer>, no, <answer> New  York</answer>", "new york", True),
        ("<answer>\\boxed{-1.5}</answer>", "-1.5", True),
        ("<answer>15</answer>", "-1.5", False),
        ("42", "42", True),
        ("It is 42", "42", False),
        ("None", "42", False),
    ],
)
def test_what_is_literally_right(said, label, right):
    async def grade(args, one, params, evaluation):
        found = flow_module.Flow(args, Settings(tools=(), judge=None), one, params, evaluation)
        found.answer = said
        return await found.is_right()

    with player(grade) as play:
        assert play(plans, sample(label=label)) is right


def test_a_model_that_is_not_served_is_no_policy(world):
    with (
        player(generate, {**world, "agentflow_urls": {}}) as play,
        pytest.raises(ValueError, match="agentflow asks the model 'executor', which is not served"),
    ):
        play(plans, sample())


def test_search_asks_a_retrieval_server():
    index = Index([{"id": "1", "contents": '"Norvik"\nNorvik is teal'}])

    async def search(args, url, params, evaluation):
        return await WikipediaSearch(args, Settings(search_url=url)).execute(query="Norvik")

    for url in serve(retrieval(index)):
        with player(search) as play:
            assert play(plans, f"{url}/retrieve") == "Doc 1(Title: Norvik) Norvik is teal\n"
    with pytest.raises(ValueError, match="agentflow_search_url"):
        WikipediaSearch(Namespace(), Settings())
    with pytest.raises(ValueError, match="the model 'coder', which is not served"):
        PythonCoder(Namespace(), Settings())


# What is read of texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Context: a\nb\nSub-Goal: c\nTool Name: `x`\nThat is it.", Plan("a\nb", "c", "x")),
        ("**Context:** a\n**Sub-Goal**: c\n**Tool Name:** My_Tool", Plan("a", "c", "My_Tool")),
        ("Tool Name: x\nTool Name: y", Plan("", "q", "y")),
        ("nothing", Plan("", "q", "")),
        ('So {"justification": "j", "context": "a", "sub_goal": "c", "tool_name": "x"}.', Plan("a", "c", "x")),
        ("Context: {a}\nTool_Name: x", Plan("{a}", "q", "x")),
    ],
)
def test_a_plan(text, expected):
    assert parse_plan(text, "q") == expected


def test_commands():
    assert arguments_of('a = 1\nexecution = tool.execute(query="x", n=[1, 2])') == {"query": "x", "n": [1, 2]}
    assert arguments_of('tool.execute(query="x")\ntool.execute(query="y")') == {"query": "y"}
    for bad in ("", "print(1)", "tool.execute(query=open('f'))", "tool.execute('x')", "tool.execute(", "\0"):
        with pytest.raises(ToolError, match="expected one call"):
            arguments_of(bad)
    assert code_block("a ```python\nx\n``` b ```\ny\n```") == "y"
    assert code_block(" x ") == "x"


# The loss


def executions(world: dict[str, Any]) -> list[Sample]:
    """Two prompts with three executions each, of one to three turns, from the generate function."""
    samples = []
    queries = [f"{kind} {NAME}" for kind in ("value", "value friend", "value friend friend")]
    with player(generate, world) as play:
        for index in range(6):
            one = sample(queries[index % 3], index, label=None if index in (0, 4, 5) else "wrong")
            one.group_index = index // 3
            made = play(plans, one)
            for turn, reward in zip(made, run(reward_func(None, made)), strict=True):
                turn.reward = reward
                turn.tokens = [token % VOCAB for token in turn.tokens]
                samples.append(turn)
    return samples


def flow_grpo(samples: list[Sample]) -> tuple[float, list[torch.Tensor]]:
    """1/B sum_i 1/T_i sum_t 1/|a_it| sum_j, with A_i = (R_i - mean R) / std R over the executions of a prompt."""
    leaves = [x.clone().requires_grad_() for x in losses.logits_of(samples, 1)]
    old, ref = losses.logits_of(samples, 2), losses.logits_of(samples, 3)
    executed = {one.rollout_id for one in samples}
    total = torch.zeros((), dtype=torch.float64)
    for i, one in enumerate(samples):
        rewards = {s.rollout_id: s.reward for s in samples if s.group_index == one.group_index}
        mean = sum(rewards.values()) / len(rewards)
        std = (sum((r - mean) ** 2 for r in rewards.values()) / (len(rewards) - 1)) ** 0.5
        turns = sum(s.rollout_id == one.rollout_id for s in samples)
        values = token_losses(one, (one.reward - mean) / (std + 1e-6), leaves[i], old[i], ref[i])
        for value in values:
            total = total + value / len(executed) / turns / len(values)
    return total.item(), list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("division", ["one", "one sample each", "shuffled"])
def test_the_loss_is_flow_grpo(world, division, monkeypatch):
    close = losses.logits_of  # policies near each other: the KL of a token is cut at 10
    monkeypatch.setattr(losses, "logits_of", lambda samples, seed: [0.3 * x for x in close(samples, seed)])
    samples = executions(world)
    assert [sum(one.rollout_id == i for one in samples) for i in range(6)] == [1, 2, 3, 1, 2, 3]
    assert {one.rollout_id for one in samples if one.reward} == {0, 4, 5}
    assert "--pg-loss-reducer=turn_mean" in EXAMPLE.flags
    args = make_args(pg_loss_reducer="turn_mean", grpo_std_normalization=True)
    loss, gradients = of_the_step(args, samples, divisions(len(samples))[division])
    expected, wanted = flow_grpo(samples)
    assert loss / 6 == pytest.approx(expected, abs=1e-6)
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found / 6, right, rtol=0, atol=1e-6)


# Metrics, data and the small world


def test_the_metrics(monkeypatch):
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(rollout, "log", lambda args, metrics, step: logged.append(metrics))
    samples = [
        Sample(rollout_id=i, metadata={"steps": steps, "tool_errors": errors})
        for i, (steps, errors) in enumerate([(1, 1), (3, 0)])
        for _ in range(steps)
    ]
    assert rollout_log(3, None, samples, {}, 1.0) is False
    assert eval_log(4, None, {"aime": {"samples": samples[:2]}}, None) is False
    assert logged == [
        {
            "rollout/agentflow/steps": 2.0, "rollout/agentflow/tool_error_rate": 0.25,
            "rollout/agentflow/samples_per_execution": 2.0, "rollout/step": 3,
        },
        {
            "eval/aime/steps": 2.0, "eval/aime/tool_error_rate": 0.25, "eval/aime/samples_per_execution": 1.0,
            "eval/step": 4,
        },
    ]  # fmt: skip


def test_the_rules_do_not_help_the_planner():
    """Their answers depend on the latest result, and on the kind of result that is asked for."""
    assert ruled(f"execute|value friend {NAME}|") == f"execution = tool.execute(key={NAME!r})"
    assert (
        ruled(f"execute|value friend {NAME}|friend=ba\nx=error: there is no tool 'a|b'")
        == "execution = tool.execute(key='ba')"
    )
    assert ruled(f"verify|value {NAME}|value=07") == "Conclusion: STOP"
    assert ruled(f"verify|next value {NAME}|value=07") == "Conclusion: CONTINUE"
    assert ruled(f"answer|value {NAME}|value=07") == "<answer>07</answer>"


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=2000)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    asked = {name: {row["messages"][0]["content"].splitlines()[0] for row in group} for name, group in rows.items()}
    assert not asked["queries"] & (asked["sft"] | asked["train"])
    assert len(asked["queries"]) == 128
    for row in rows["train"]:
        assert row["label"] == answer_to(row["messages"][0]["content"])
    right = sum(
        row["messages"][1]["content"].split()[-1] == plan_for(query)[len(steps)]
        for row in rows["sft"]
        for query, *steps in [row["messages"][0]["content"].splitlines()]
    )
    assert 0.42 < right / len(rows["sft"]) < 0.48
