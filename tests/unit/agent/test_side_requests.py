"""Requests beside an agent's work are answered and kept out of training; what became of a session's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.side_requests import is_agent_turn
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.ray.manager.rollout_metrics import agent_metrics
from slime.utils.types import Sample
from tests.support.agents import END, call_text, gateway, trained_text

BASE = Sample(index=1, group_index=0)
TOOLS = [{"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
NONCES = [f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={n};" for n in ("f00", "ba5", "c0d")]


def meta(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": changes.pop("system", "be good")}, {"role": "user", "content": "title?"}]
    return {"max_tokens": 100, "has_tools": False, "model": "actor", "messages": messages, **changes}


@pytest.mark.parametrize(
    ("turn", "trained"),
    [
        (meta(), True),
        (meta(max_tokens=1), False),
        (meta(max_tokens=None, has_tools=True), True),
        (meta(system="Generate a concise, sentence-case title for the session"), False),
        (meta(system="Analyze if this message indicates a new conversation topic."), False),
        (meta(system="Analyze if this message indicates a new conversation topic.", has_tools=True), True),
        (meta(model="claude-haiku-4-5"), False),
        (meta(model="claude-haiku-4-5", has_tools=True), True),
    ],
)
def test_which_requests_are_the_agents(turn, trained):
    assert is_agent_turn(turn) is trained


async def test_a_session_of_claude_code_is_one_sample_despite_its_nonce_probe_and_title():
    seen: list[dict[str, Any]] = []

    def turn_filter(turn_meta: Any) -> bool:
        seen.append(turn_meta)
        return is_agent_turn(turn_meta)

    call = call_text("add", {"a": 1})
    with gateway(AnthropicAdapter, "#", "Sums", call, "done", turn_filter=turn_filter, max_turns_per_sid=4) as g:

        def ask(*blocks: Any, system: str, **body: Any) -> Any:
            body = {"model": "claude-opus", "max_tokens": 300, "messages": list(blocks), **body}
            texts = [NONCES[len(seen) % 3], system]
            body["system"] = [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in texts]
            headers = {"X-Claude-Code-Session-Id": "s", "anthropic-beta": "a,b"}
            return requests.post(f"{g.url}/v1/messages?beta=true", json=body, headers=headers, timeout=20)

        user = {"role": "user", "content": "sum"}
        assert requests.head(g.url, timeout=20).status_code == 200
        assert ask({"role": "user", "content": "quota"}, system="-", max_tokens=1).status_code == 200
        assert ask(user, system="Write a 3-5 word title", model="claude-haiku").status_code == 200
        answer = ask(user, system="code", tools=TOOLS).json()
        result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "2"}
        turns = [user, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        assert ask(*turns, system="code", tools=TOOLS).json()["content"][0]["text"] == "done"
        assert ask(*turns, system="code", tools=TOOLS).status_code == 429  # the others count too
        assert not any("billing" in prompt for prompt in g.script.prompts)
        [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == [call + END, "done" + END]
    assert [(turn["max_tokens"], turn["has_tools"], turn["path"]) for turn in seen] == [
        (1, False, "/v1/messages"), (300, False, "/v1/messages"), *[(300, True, "/v1/messages")] * 2,
    ]  # fmt: skip
    assert sample.agent_session == {
        "session": "s",
        "generated_tokens": len(call) + len("done") + 2,
        "trained_tokens": len(call) + len("done") + 2,
        "realign_tokens": 0,
        "forks": 0,
    }


async def test_without_a_filter_all_requests_are_recorded():
    with gateway(OpenAIAdapter, "#") as g:
        body = {"messages": [{"role": "user", "content": "quota"}], "max_tokens": 1}
        headers = {"Authorization": "Bearer s"}
        assert requests.post(f"{g.url}/v1/chat/completions", json=body, headers=headers, timeout=20).status_code == 200
        assert len(await g.adapter.finish_session("s", base_sample=BASE)) == 1


def counts_of(*turns: tuple[str, str, list[str]], **options: Any) -> list[Sample]:
    """The samples of turns given as prompt, answer and what the messages are."""
    manager = TrajectoryManager(**options)
    for prompt, answer, messages in turns:
        roles = ["user" if place % 2 == 0 else "assistant" for place in range(len(messages))]
        asked = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
        record = TurnRecord([ord(c) for c in prompt], [ord(c) for c in answer], "stop", [-1.0] * len(answer))
        said = {"role": "assistant", "content": answer}
        manager.record_turn("s", turn=record, prompt_messages=asked, response_message=said)
    return manager.get_trajectory("s", base_sample=BASE)


def test_counts_of_clean_realigned_forked_and_rewritten_sessions():
    clean = counts_of(("ab", "XYZ", ["ab"]), ("abXYZcd", "UV", ["ab", "XYZ", "cd"]))
    realigned = counts_of(("ab", "XYZ", ["ab"]), ("abXycd", "UV", ["ab", "XYZ", "cd"]))
    forked = counts_of(("ab", "XYZ", ["ab"]), ("aQ", "UV", ["ab", "XYZ", "cd"]))
    rewritten = counts_of(("ab", "XYZ", ["ab"]), ("abxyzcd", "UV", ["ab", "xyz", "cd"]))
    other_agent = counts_of(("ab", "XYZ", ["ab"]), ("pq", "UV", ["pq"]))
    columns = ("generated_tokens", "trained_tokens", "realign_tokens", "forks")
    found = [tuple(samples[0].agent_session[c] for c in columns) for samples in (clean, realigned, forked, rewritten)]
    assert found == [(5, 5, 0, 0), (5, 3, 2, 0), (5, 5, 0, 1), (5, 2, 3, 0)]
    assert [sample.agent_session["forks"] for sample in other_agent] == [0, 0]  # two conversations, no fork
    for number, samples in enumerate([clean, realigned, forked]):
        for sample in samples:
            sample.agent_session = {**sample.agent_session, "session": number}
    assert agent_metrics([*clean, *realigned, *forked]) == {
        "realign_tokens": 2, "forks_per_session": 1 / 3, "trained_token_share": 13 / 15,
    }  # fmt: skip
    assert agent_metrics([BASE]) == {}
    assert Sample.from_dict(clean[0].to_dict()).agent_session["generated_tokens"] == 5
