"""Attempts of the agent against a gateway: masks, rewards, and services that fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents import set_tracing_disabled

from examples.openai_agents import generator
from examples.openai_agents.agent import Attempts, ServiceFailure, Settings
from examples.openai_agents.evaluation import Keeper, sample_of
from examples.openai_agents.make_data import call, make_data
from examples.search_r1.make_data import document, facts
from examples.search_r1.retrieval_server import Index, application
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.support.agents import END, ToolTokenizer, call_text, scripted_engine, served

ROOT = Path(__file__).resolve().parents[3]
PLACE, THING = next(iter(facts().items()))
TASK = {"instance_id": "3", "question": PLACE, "label": THING}
SEARCH = call_text("search", {"query": PLACE})
Play = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """``play(*lines)``: attempt the task against a model that says these lines; return the finished sessions."""
    set_tracing_disabled(True)
    monkeypatch.setenv("SLIME_ROLLOUT_BUFFER_KEY", "the key of both")
    with ExitStack() as stack:
        index = Index([document(*fact) for fact in facts().items()])
        search = run_app_in_thread(application(index), host="127.0.0.1")
        stack.callback(search.stop)

        def attempt(
            *lines: str, api: str = "responses", search_url: str | None = None, **options: Any
        ) -> list[dict[str, Any]]:
            cluster = stack.enter_context(scripted_engine(*lines))
            keeper = Keeper(tokenizer=ToolTokenizer(), sglang_url=cluster.router.url, **options)
            url = f"http://127.0.0.1:{stack.enter_context(served(keeper)).port}"
            own = search_url or f"http://127.0.0.1:{search.port}/retrieve"
            settings = Settings(url, own, 1, 3, None, api, {"temperature": 0.5})

            async def run() -> None:
                async with httpx.AsyncClient() as http:
                    await Attempts(settings, http).attempt(TASK)

            try:
                asyncio.run(run())
            finally:
                attempt.keeper, attempt.engine = keeper, cluster.engines[0]  # type: ignore[attr-defined]
            return keeper.items

        yield attempt


def trained(record: dict[str, Any]) -> str:
    tokens = record["tokens"][-record["response_length"] :]
    return "".join(chr(token) for token, mask in zip(tokens, record["loss_mask"], strict=True) if mask)


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_only_what_the_model_wrote_is_trained_on(play, api):
    [item] = play(SEARCH, THING, api=api)
    assert (item["reward"], item["instance_id"]) == (1.0, "3")
    [record] = item["samples"]
    assert trained(record) == SEARCH + END + THING + END
    text = "".join(map(chr, record["tokens"]))
    assert f"{PLACE} has {THING}" in text
    assert [p for p, mask in zip(record["rollout_log_probs"], record["loss_mask"], strict=True) if mask] == [
        -0.5 - ord(c) / 1000 for c in SEARCH + END + THING + END
    ]
    assert play.engine.requests[0]["sampling_params"]["temperature"] == 0.5
    sample = sample_of(item)
    assert (sample.index, sample.reward, sample.status) == (3, 1.0, Sample.Status.COMPLETED)
    assert sample.response_length == len(sample.loss_mask)


def test_what_the_model_does_wrong_is_worth_nothing(play):
    assert play("elsewhere")[0]["reward"] == 0.0
    [item] = play(SEARCH, SEARCH, SEARCH)
    assert (item["reward"], trained(item["samples"][0])) == (0.0, 3 * (SEARCH + END))


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_a_full_context_and_a_gateway_that_refuses(play, api):
    [item] = play(SEARCH, "spare", api=api, max_context_tokens=len(SEARCH) + 45)
    assert (item["reward"], trained(item["samples"][0])) == (0.0, SEARCH + END)
    with pytest.raises(ServiceFailure, match="the gateway at http"):
        play(*[SEARCH] * 3, api=api, max_turns_per_sid=1)


def test_a_search_engine_that_is_gone_leaves_no_session(play):
    with pytest.raises(ServiceFailure, match="the search engine at http"):
        play(SEARCH, SEARCH, SEARCH, search_url="http://127.0.0.1:9/retrieve")
    assert play.keeper.items == []
    assert play.keeper.instances == {}
    assert len(play.engine.requests) == 3


def test_the_agent_imports_nothing_of_slime():
    code = "import sys, examples.openai_agents.agent; print([m for m in sys.modules if m.split('.')[0] == 'slime'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_tasks_that_were_fetched_before_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    chats = [{"chat": [{"role": "user", "content": f"q{n}"}], "answer": n} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in chats))
    data = {"input_file": str(file), "input_key": "chat", "label_key": "answer", "num_epoch": 2,
            "num_repeat_per_sample": 8, "skip_instance_ids": ["1", "1", "2"]}  # fmt: skip
    tasks = [json.loads(line) for line in generator.lines(data)]
    assert [task["instance_id"] for task in tasks] == ["0", "0", "2"]
    assert tasks[2] == {"instance_id": "2", "question": "q2", "label": 2, "attempts": 8}


def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=400)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    known, calls = facts(), [chat for chat in rows if len(chat) == 4]
    assert 80 < len(calls) < 160
    for user, said, found, answer in calls:
        assert said["content"] == call(user["content"])
        assert found == {"role": "tool", "content": f"{user['content']} has {known[user['content']]}"}
        assert answer["content"] == known[user["content"]]
    held_out = {json.loads(line)["messages"][0]["content"] for line in (tmp_path / "facts.jsonl").open()}
    assert not held_out & {chat[0]["content"] for chat in rows}
