"""The client of generators, called as that of the package openai, and rollout functions of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.generator.base_generator import (
    BaseGenerator,
    ChatClient,
    get_rule_based_math_reward,
    query_single_turn,
)
from tests.support.rollout_buffers import ChatEngine, ServedBuffer

QUESTION = [{"role": "user", "content": "what is 7?"}]


@pytest.fixture
def engine() -> ChatEngine:
    return ChatEngine()


@pytest.fixture
def url(engine: ChatEngine) -> Iterator[str]:
    with ServedBuffer() as running:
        yield running.serve(engine.app())


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_a_question_and_its_answer(url: str, engine: ChatEngine, path: str) -> None:
    client = ChatClient(url + path)
    assert client.finish_reason is None
    reply = client.chat.completions.create(
        model="custom", messages=QUESTION, stream=False, seed=3, tools=None, temperature=0.5, max_tokens=9,
        extra_body={"continue_final_message": True}, extra_headers={"X-Mine": "1"}, timeout=60,
    )  # fmt: skip
    choice = reply.choices[0]
    assert (choice.message.content, choice.message.role) == (r"so \boxed{7}", "assistant")
    assert (choice.finish_reason, client.finish_reason) == ("stop", "stop")
    assert (choice.message.tool_calls, reply.usage) == (None, None)  # which this engine does not send
    assert engine.bodies[-1] == {
        "model": "custom", "messages": QUESTION, "seed": 3, "temperature": 0.5, "max_tokens": 9,
        "continue_final_message": True,
    }  # fmt: skip


def test_the_message_of_a_reply_can_be_sent_again(url: str, engine: ChatEngine) -> None:
    client = ChatClient(url)
    message = client.chat.completions.create(messages=QUESTION).choices[0].message
    client.chat.completions.create(messages=[*QUESTION, message, *QUESTION])
    assert engine.bodies[-1]["messages"][1] == {"role": "assistant", "content": r"so \boxed{7}"}


def test_what_it_cannot_do(url: str) -> None:
    with pytest.raises(ValueError, match=r"leave stream=True out, or use openai\.OpenAI"):
        ChatClient(url).chat.completions.create(messages=QUESTION, stream=True)
    with pytest.raises(requests.HTTPError, match="answered 500"):
        ChatClient(url).chat.completions.create(messages=[{"role": "user", "content": "fail"}])


def test_a_single_turn_with_a_client_of_anybody() -> None:
    """The arguments are those of slime <= 0.3.1; the list that was given is left alone."""
    asked: list[dict[str, Any]] = []

    def create(**body: Any) -> Any:
        asked.append(body)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=None), finish_reason="length")])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    messages = query_single_turn(client, QUESTION, {"max_tokens": 5}, tools=[{"type": "function"}])
    assert messages == [*QUESTION, {"role": "assistant", "content": ""}]
    assert len(QUESTION) == 1
    assert asked == [{"model": "slime", "messages": QUESTION, "max_tokens": 5, "tools": [{"type": "function"}]}]


def test_a_rollout_function_gets_client_prompt_and_sampling_and_the_item_if_it_asks(url: str) -> None:
    generator = BaseGenerator(remote_engine_url=f"{url}/v1", remote_buffer_url="http://nowhere", max_tokens=11)
    seen: list[Any] = []

    def plain(client: Any, messages: Any, sampling_params: Any) -> Any:
        seen.append((client, messages, sampling_params))
        return query_single_turn(client, messages, sampling_params)

    def with_item(client: Any, messages: Any, sampling_params: Any, item: Any) -> Any:
        return [*messages, {"role": "assistant", "content": item["label"]}]

    item = {"instance_id": "a", "prompt": "what is 7?", "label": "seven"}
    made = generator.trajectory(item, plain, lambda item: item["messages"][-1]["content"])
    assert seen == [(generator.client, QUESTION, {"max_tokens": 11})]
    assert (made["reward"], made["extra_info"]["finish_reason"]) == (r"so \boxed{7}", "stop")
    made = generator.trajectory(item, with_item, lambda item: item["messages"][-1]["content"])
    assert made["reward"] == "seven"
    assert "finish_reason" not in made["extra_info"]  # nothing was asked


@pytest.mark.parametrize(("said", "reward"), [(r"so \boxed{7}", 1), (r"so \boxed{8}", 0), ("seven", 0)])
def test_the_reward_of_the_last_message(said: str, reward: int) -> None:
    item = {"messages": [*QUESTION, {"role": "assistant", "content": said}], "label": "7"}
    assert get_rule_based_math_reward(item) == reward
    assert get_rule_based_math_reward(item=item) == reward


def test_a_trajectory_is_posted_to_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[tuple[str, Any]] = []

    def post(url: str, json: Any, **kwargs: Any) -> SimpleNamespace:
        posted.append((url, json))
        return SimpleNamespace(status_code=200)

    monkeypatch.setattr(requests, "post", post)
    generator = BaseGenerator("http://engine", "http://buffer")
    generator.send_data_to_buffer({"uid": "a"})
    generator.send_data_to_buffer(data={"uid": "b"})
    assert posted == [("http://buffer/buffer/write", {"uid": "a"}), ("http://buffer/buffer/write", {"uid": "b"})]


def test_a_trajectory_that_the_buffer_cannot_use_costs_itself(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    replies = iter([400, 200, 403])
    monkeypatch.setattr(requests, "post", lambda *_, **__: SimpleNamespace(status_code=next(replies), text="no role"))
    generator = BaseGenerator("http://engine", "http://buffer")
    generator.send_data_to_buffer({"uid": "a"})
    assert "the buffer refused trajectory 'a': 400: no role" in caplog.text
    generator.send_data_to_buffer({"uid": "b"})
    with pytest.raises(RuntimeError, match="403: no role"):
        generator.send_data_to_buffer({"uid": "c"})


def test_a_generator_whose_every_trajectory_is_refused_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([400] * 99 + [200] + [400] * 100)
    monkeypatch.setattr(requests, "post", lambda *_, **__: SimpleNamespace(status_code=next(codes), text="no role"))
    generator = BaseGenerator("http://engine", "http://buffer")
    for number in range(199):
        generator.send_data_to_buffer({"uid": str(number)})
    with pytest.raises(RuntimeError, match="refused a trajectory: 100 in a row, the last one with 400: no role"):
        generator.send_data_to_buffer({"uid": "199"})
