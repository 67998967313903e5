"""The gateway command: agents without slime, sessions over HTTP, trajectories with tokens in the rollout buffer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from slime.agent import serve
from slime.agent.adapters.side_requests import is_agent_turn
from slime.agent.serve import Gateway, checkpoint_of, make_parser
from slime.servers.key_file import shared_key
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.group_queue import GroupQueue, ItemError
from slime_plugins.rollout_buffer.rollout_buffer_example import generate_rollout
from tests.support.agents import END, ToolTokenizer, call_text, scripted_engine, served
from tests.support.arguments import run_args
from tests.support.rollout_buffers import ServedBuffer
from tests.unit.slime_plugins.test_group_queue import item
from tests.unit.slime_plugins.test_rollout_buffer import ChatML, MultiTurnLossMaskGenerator, Source

TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]
ADD = call_text("add", {"a": 1})
KEY = shared_key()
RECORD = {"tokens": [5, 6, 7], "response_length": 2, "loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0]}


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``start(*lines)``: a gateway before a scripted engine, with a rollout buffer behind it."""
    monkeypatch.setattr(rollout_buffer_example, "_started", {})
    masks = MultiTurnLossMaskGenerator(ChatML(), "qwen")
    monkeypatch.setattr(rollout_buffer_example, "mask_generator", lambda *a: masks)
    running: list[Any] = []

    def enter(context: Any) -> Any:
        running.append(context)
        return context.__enter__()

    def start(*lines: str, key: str | None = None, sink: str | None = None) -> SimpleNamespace:
        cluster = enter(scripted_engine(*lines))
        buffer = enter(ServedBuffer(key=key))
        options = {"tokenizer": ToolTokenizer(), "sglang_url": cluster.router.url, "turn_filter": is_agent_turn}
        gateway = Gateway(sink=sink or buffer.url, key=key, **options)
        url = f"http://127.0.0.1:{enter(served(gateway)).port}"
        return SimpleNamespace(gateway=gateway, buffer=buffer, url=url, engine=cluster.engines[0])

    yield start
    for context in reversed(running):
        context.__exit__(None, None, None)


def post(url: str, token: str = "", **body: Any) -> requests.Response:
    """With the key of the tests, unless the path is an agent's and ``token`` its session."""
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {token or KEY}"}, timeout=30)


def drop(url: str) -> requests.Response:
    return requests.delete(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)


def responses_session(s: SimpleNamespace, instance: str, reward: float) -> dict[str, Any]:
    """Two turns of one session, finished."""
    sid = post(f"{s.url}/sessions", instance_id=instance).json()["session_id"]
    items: list[Any] = [{"role": "user", "content": f"do {instance}"}]
    items += post(f"{s.url}/v1/responses", sid, input=items, tools=TOOLS).json()["output"]
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "2"})
    assert post(f"{s.url}/v1/responses", sid, input=items, tools=TOOLS).status_code == 200
    return post(f"{s.url}/sessions/{sid}/finish", reward=reward).json()


def two_conversations(s: SimpleNamespace, instance: str, reward: float) -> dict[str, Any]:
    """A session of two agents, one of each other protocol."""
    sid = post(f"{s.url}/sessions", instance_id=instance, session_id="mine").json()["session_id"]
    asked = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
    assert post(f"{s.url}/v1/messages", sid, max_tokens=30, **asked).json()["type"] == "message"
    asked["messages"] = [{"role": "user", "content": "two"}]
    assert post(f"{s.url}/v1/chat/completions", sid, **asked).json()["object"] == "chat.completion"
    return post(f"{s.url}/sessions/{sid}/finish", reward=reward).json()


async def test_sessions_of_agents_without_slime_become_groups_of_a_rollout(system):
    s = system(ADD, "sum", "first", "second")
    args = run_args(
        rollout_buffer_url=s.buffer.url, rollout_task_type="external", fetch_trajectory_retry_times=-1,
        hf_checkpoint="none", rollout_batch_size=1, n_samples_per_prompt=3, num_rollout=None, loss_mask_type="qwen",
        sglang_router_ip="127.0.0.1", sglang_router_port=1, rollout_request_timeout=60.0, vocab_size=0x110000,
    )  # fmt: skip
    rollout = asyncio.create_task(asyncio.to_thread(generate_rollout, args, 0, Source(0)))
    async with asyncio.timeout(120):
        while s.buffer.buffer.queue is None or s.buffer.buffer.generator is None:
            await asyncio.sleep(0.05)

    def work() -> None:
        assert responses_session(s, "task", 1.0)["samples"] == 1
        assert two_conversations(s, "task", 0.5)["samples"] == 2
        sid = post(f"{s.url}/sessions", instance_id="task").json()["session_id"]
        assert post(f"{s.url}/sessions/{sid}/finish", reward=0).json()["samples"] == 0  # the agent never asked

    await asyncio.to_thread(work)
    [[one, several, failed]] = (await rollout).samples
    text = "".join(map(chr, one.tokens[-one.response_length :]))
    assert text.startswith(ADD + END)
    assert text.endswith("sum" + END)
    trained = [p for p, mask in zip(one.rollout_log_probs, one.loss_mask, strict=True) if mask]
    assert trained == [-0.5 - ord(c) / 1000 for c in ADD + END + "sum" + END]
    assert (one.reward, one.metadata["use_tool"], one.weight_versions) == (1.0, True, ["0", "0"])
    assert one.agent_session["trained_tokens"] == len(trained)
    assert [sample.response for sample in several] == ["first" + END, "second" + END]
    assert {(x.reward, x.rollout_id, x.group_index) for x in several} == {(0.5, several[0].index, one.group_index)}
    assert (failed.status, failed.remove_sample) == (Sample.Status.FAILED, True)
    assert len(failed.rollout_log_probs) == failed.response_length
    assert (s.gateway.instances, s.gateway.conversations, s.gateway.store) == ({}, {}, {})


def test_sessions_are_opened_finished_and_dropped_once(system):
    s = system("a")
    sid = post(f"{s.url}/sessions", instance_id=7, sampling_params={"temperature": 0.5}).json()["session_id"]
    assert post(f"{s.url}/v1/chat/completions", sid, messages=[{"role": "user", "content": "q"}]).status_code == 200
    assert s.engine.requests[0]["sampling_params"]["temperature"] == 0.5
    assert drop(f"{s.url}/sessions/{sid}").json() == {"session_id": sid}
    assert s.gateway.conversations == {}
    for answer, words in (
        (post(f"{s.url}/sessions/{sid}/finish", reward=1), "is not open"),
        (post(f"{s.url}/sessions/{sid}/finish"), "finished with a reward"),
        (post(f"{s.url}/sessions"), "instance_id must say which task"),
        (post(f"{s.url}/sessions", instance_id="a", sampling_params=3), "sampling_params must be an object"),
    ):
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)
    body = {"messages": [{"role": "user", "content": "q"}]}
    assert post(f"{s.url}/v1/chat/completions", sid, **body).status_code == 503
    assert post(f"{s.url}/v1/chat/completions", "unknown", **body).status_code == 401
    for headers, name in (({"anthropic-version": "2023-06-01"}, "first_id"), ({}, "object")):
        assert name in requests.get(f"{s.url}/v1/models", headers=headers, timeout=30).json()


def test_a_session_that_could_not_be_written_is_written_later(system, monkeypatch):
    s = system(ADD, "sum", sink="http://127.0.0.1:1")
    tries: list[Any] = []
    original = s.gateway.client.post

    async def once(url: str, item: Any, max_retries: int) -> Any:
        tries.append(url)
        return await original(url, item, max_retries=1)

    monkeypatch.setattr(s.gateway.client, "post", once)
    answer = responses_session(s, "task", 1.0)
    assert "finish it again" in answer["error"]["message"]
    [sid] = s.gateway.unsent
    s.gateway.sink = s.buffer.url
    s.gateway.client.trust(s.buffer.url)
    answer = post(f"{s.url}/sessions/{sid}/finish", reward=1.0).json()
    assert (answer["samples"], answer["trained_tokens"]) == (1, len(ADD + "sum") + 2)
    assert (len(tries), s.gateway.unsent) == (2, {})


def test_the_key_is_needed_for_sessions_and_not_for_turns(system):
    s = system("a", key="secret")
    assert post(f"{s.url}/sessions", instance_id="a").status_code == 401
    assert post(f"{s.url}/sessions", "wrong", instance_id="a").status_code == 401
    sid = post(f"{s.url}/sessions", "secret", instance_id="a").json()["session_id"]
    assert post(f"{s.url}/v1/chat/completions", sid, messages=[{"role": "user", "content": "q"}]).status_code == 200
    assert post(f"{s.url}/sessions/{sid}/finish", "secret", reward=1.0).json()["samples"] == 1


async def test_the_tokenizer_is_the_one_of_the_engine():
    with scripted_engine() as cluster:
        assert await checkpoint_of(cluster.engines[0].url) == "stand-in"


def test_the_command_line(monkeypatch, capsys):
    words = make_parser().parse_args(["--engine", "http://e", "--sink", "http://s"])
    assert (words.host, words.port, words.max_context_tokens, words.train_side_requests) == (
        "127.0.0.1",
        8890,
        0,
        False,
    )
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["serve", "--engine", "http://e", "--sink", "http://s", "--host", "0.0.0.0"])
    with pytest.raises(SystemExit):
        serve.main()
    assert "can be reached from elsewhere: set SLIME_ROLLOUT_BUFFER_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (3, "samples must be a list of objects"),
        ([], "samples must not be empty"),
        ([{}], "samples[0].tokens must be a list of token ids, whole numbers from 0"),
        ([{**RECORD, "tokens": [1, -1]}], "samples[0].tokens must be a list of token ids, whole numbers from 0"),
        (
            [RECORD, {**RECORD, "response_length": 4}],
            "samples[1].response_length must be from 1 to its 3 tokens less one of a prompt, got 4",
        ),
        ([{**RECORD, "loss_mask": [1]}], "samples[0].loss_mask must be 2 numbers, 0 or 1 each"),
        ([{**RECORD, "loss_mask": [1, 2]}], "samples[0].loss_mask must be 2 numbers, 0 or 1 each"),
        ([{**RECORD, "rollout_log_probs": [0.0]}], "samples[0].rollout_log_probs must be 2 finite numbers"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused_when_they_are_written(samples, words):
    queue = GroupQueue(1, "external")
    with pytest.raises(ItemError) as caught:
        queue.write({**item("u"), "samples": samples})
    assert words in str(caught.value)
    queue.write({**item("u"), "samples": [RECORD, RECORD]})
    queue.write({**item("v", "b", error="no"), "samples": []})
    assert len(queue.ready) == 2
