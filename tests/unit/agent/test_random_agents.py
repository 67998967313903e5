"""Random agents of all protocols before random chat templates: samples are those of a slow version, every token of the
engine is trained on at most once, and nothing else is.

Agents append, edit, branch, compact, ask again, drop reasoning, and clean what they send back; templates write answers
as the model did, or strip reasoning, write JSON otherwise, or trim text.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.adapters.common import Reply
from slime.agent.adapters.provider import ProviderFormat
from slime.agent.adapters.responses import ResponsesFormat
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from tests.support.agents import BEGIN, END, ToolTokenizer
from tests.unit.agent.test_trajectory import BASE, SlowManager

pytestmark = pytest.mark.slow

Wire = list[dict[str, Any]]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    values = "".join(f"<parameter={key}>{text}</parameter>" for key, text in texts.items())
    return f"<tool_call><function={name}>{values}</function></tool_call>"


class Template(ToolTokenizer):
    """``strips``: reasoning of answers before the latest user message; ``sorts``: arguments by name; ``trims`` text."""

    def __init__(self, strips: bool, sorts: bool, trims: bool) -> None:
        self.strips, self.sorts, self.trims = strips, sorts, trims

    def apply_chat_template(
        self, messages: list[dict], *, tools: Any = None, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> Any:
        last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=0)
        text = ""
        for place, message in enumerate(messages):
            thought = message.get("reasoning_content") if not (self.strips and place < last) else None
            said = message["content"].strip() if self.trims else message["content"]
            calls = [one["function"] for one in message.get("tool_calls") or []]
            text += f"{BEGIN}{message['role']}\n" + (f"<think>{thought}</think>" if thought else "") + said
            for one in calls:
                given = one["arguments"]
                text += call_text(one["name"], dict(sorted(given.items())) if self.sorts else given)
            text += END
        return self.encode(text + f"{BEGIN}assistant\n")


TOOL = {"name": "f", "input_schema": {"properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}}
FUNCTION = {"name": "f", "parameters": TOOL["input_schema"]}


class Messages:
    """An agent that speaks the Messages API; the others differ in the form of what they send."""

    tools: Wire = [TOOL]  # noqa: RUF012

    def body(self, history: Wire) -> dict[str, Any]:
        return {"messages": history, "tools": self.tools, "max_tokens": 90}

    def user(self, text: str) -> Wire:
        return [{"role": "user", "content": text}]

    def answer(self, message: dict[str, Any]) -> Wire:
        return [{"role": "assistant", "content": message["content"]}]

    def results(self, answer: Wire, text: str) -> Wire:
        uses = [block for block in answer[0]["content"] if block["type"] == "tool_use"]
        return (
            self.user([{"type": "tool_result", "tool_use_id": u["id"], "content": text} for u in uses]) if uses else []
        )

    def without_reasoning(self, answer: Wire) -> None:
        kept = [block for block in answer[0]["content"] if block["type"] != "thinking"]
        answer[0]["content"] = kept or [{"type": "text", "text": ""}]

    def cleaned(self, answer: Wire) -> None:
        """As Claude Code's tools do it."""
        for block in answer[0]["content"]:
            if block["type"] == "tool_use":
                block["input"] = {"all": False, **{key: block["input"][key] for key in sorted(block["input"])}}

    def edited(self, answer: Wire) -> None:
        answer[0]["content"] = [{"type": "text", "text": "edited"}]


class Chat(Messages):
    tools: Wire = [{"type": "function", "function": FUNCTION}]  # noqa: RUF012

    def answer(self, message: dict[str, Any]) -> Wire:
        return [message]

    def results(self, answer: Wire, text: str) -> Wire:
        calls = answer[0].get("tool_calls") or []
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]

    def without_reasoning(self, answer: Wire) -> None:
        answer[0].pop("reasoning_content", None)

    def cleaned(self, answer: Wire) -> None:
        for call in answer[0].get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))

    def edited(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": "edited"}]


class Responses(Messages):
    tools: Wire = [{"type": "function", **FUNCTION}]  # noqa: RUF012

    def body(self, history: Wire) -> dict[str, Any]:
        return {"input": history, "tools": self.tools}

    def answer(self, message: dict[str, Any]) -> Wire:
        return list(message["items"])

    def results(self, answer: Wire, text: str) -> Wire:
        calls = [item for item in answer if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": text} for call in calls]

    def without_reasoning(self, answer: Wire) -> None:
        answer[:] = [item for item in answer if item["type"] != "reasoning"] or [
            {"role": "assistant", "content": "", "type": "message"}
        ]

    def cleaned(self, answer: Wire) -> None:
        for item in answer:
            item.pop("id", None)

    def edited(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": "edited", "type": "message"}]


AGENTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}
STEPS = ["on", "on", "on", "user", "edit", "branch", "compact", "again", "drop", "clean", "clean"]
arguments = st.lists(st.sampled_from(["b", "a"]), unique=True).map(
    lambda keys: {k: 1 if k == "b" else "x " for k in keys}
)
outputs = st.tuples(
    st.sampled_from(["", "", "hm", "h\nm"]),
    st.sampled_from(["", "yes", " yes", "no\n"]),
    st.lists(arguments, max_size=2),
)
histories = st.tuples(
    st.sampled_from(sorted(AGENTS)),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from([0, 12, 40, 1024]),
    st.lists(st.tuples(st.sampled_from(STEPS), outputs, st.integers(0, 9)), min_size=1, max_size=6),
)


@functools.cache
def gateway_of(kind: type[BaseAdapter], how: tuple[bool, bool, bool]) -> BaseAdapter:
    return kind(tokenizer=Template(*how), sglang_url="http://nowhere")


def played(history: Any) -> Iterator[tuple[list[dict], dict, TurnRecord]]:
    """Run an agent without HTTP: prompts, answers and turns, as a gateway gives them to its manager."""
    protocol, how, _, steps = history
    agent, gateway = AGENTS[protocol], gateway_of(AnthropicAdapter if protocol == "messages" else OpenAIAdapter, how)
    template = gateway.tokenizer
    api: ProviderFormat = ResponsesFormat() if protocol == "responses" else gateway
    numbers, kept = itertools.count(1), {}
    states: list[tuple[Wire, Wire]] = []
    """What was asked, and what was answered to it."""
    for step, (thought, text, calls), choice in steps:
        asked = agent.user(f"q{choice % 2}")
        if states and step != "compact":
            before, answer = copy.deepcopy(states[-1 if step != "branch" else choice % len(states)])
            if step == "again":
                asked = before
            else:
                done = agent.results(answer, str(choice))
                for change, function in (
                    ("drop", agent.without_reasoning), ("clean", agent.cleaned), ("edit", agent.edited),
                ):  # fmt: skip
                    if step == change:
                        function(answer)
                done = [] if step == "edit" else done
                asked = [*before, *answer, *(done if done and step != "user" else [*done, *asked])]
        body = api.restored(json.loads(json.dumps(agent.body(asked))), kept)
        messages, tools = api.translate(body)
        prompt = gateway.text._render(messages, tools)
        said = (f"<think>{thought}</think>" if thought else "") + text + "".join(call_text("f", one) for one in calls)
        output = template.encode(said + END)
        turn = TurnRecord(prompt, output, "stop", [-next(numbers) / 1e6 for _ in output])
        parsed = gateway.text._parse(turn, tools)
        message = api.reply_message(Reply(parsed.reasoning, parsed.text, parsed.tool_uses, "stop", 0, 0), body)
        kept |= api.to_restore(message)
        states.append((asked, agent.answer(json.loads(json.dumps(message)))))
        yield api.tree_messages(messages), api.tree_messages([api.translate_reply(message)])[0], turn


def check(history: Any) -> None:
    threshold = history[2]
    manager, slow = TrajectoryManager(fork_threshold_tokens=threshold), SlowManager(threshold)
    turns = []
    for messages, said, turn in played(history):
        manager.record_turn("s", turn=turn, prompt_messages=messages, response_message=said)
        slow.record(messages, said, turn)
        turns.append(turn)
    samples = manager.get_trajectory("s", base_sample=BASE)
    shown, trained = [], []
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        rows = list(zip(sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs, strict=True))
        shown.append((sample.tokens[:cut], [token if mask else -token for token, mask, _ in rows]))
        trained += [(token, log_prob) for token, mask, log_prob in rows if mask]
    assert shown == slow.samples()
    made = [pair for turn in turns for pair in zip(turn.output_ids, turn.output_log_probs, strict=True)]
    assert len(trained) == len(set(trained))  # every log-prob is of one token of one answer
    assert set(trained) <= set(made)
    if threshold == 0:
        assert len(trained) == len(made)
    whole = [[*turn.prompt_ids, *turn.output_ids] for turn in turns]
    assert all(sample.tokens in whole for sample in samples)


@settings(max_examples=60, deadline=None)
@given(histories)
def test_random_agents_and_templates(history):
    check(history)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(histories)
def test_many_random_agents_and_templates(history):
    check(history)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["on", "user", "clean"]), outputs, st.integers(0, 9)), min_size=1, max_size=6)
)
def test_agents_that_only_append_and_clean_have_one_clean_sample(steps):
    """Of Claude Code's kind, before a template that writes answers as the model does."""
    steps = [(step, (thought, text.strip(), calls), choice) for step, (thought, text, calls), choice in steps]
    manager, made = TrajectoryManager(), 0
    for messages, said, turn in played(("messages", (False, False, False), 1024, steps)):
        manager.record_turn("s", turn=turn, prompt_messages=messages, response_message=said)
        made += len(turn.output_ids)
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert sum(sample.loss_mask) == made
