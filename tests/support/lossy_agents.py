"""Agents of the three protocols that send answers back in lossy forms, before chat templates that write them otherwise.

A history is played without HTTP, through the parts that a gateway has: translation, matching, rendering, parsing.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.adapters.common import Reply
from slime.agent.adapters.provider import ProviderFormat
from slime.agent.adapters.responses import ResponsesFormat
from slime.agent.trajectory import RENDERING, TrajectoryManager, TurnRecord
from tests.support.agents import BEGIN, END, ToolTokenizer

Wire = list[dict[str, Any]]


def call_text(name: str, arguments: dict[str, Any], space: str = "", separators: Any = None) -> str:
    values = "".join(
        f"<parameter={key}>{value if isinstance(value, str) else json.dumps(value, separators=separators)}</parameter>"
        f"{space}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{space}<function={name}>{space}{values}</function>{space}</tool_call>"


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


SCHEMA = {"properties": {"b": {"type": "integer"}, "a": {"type": "string"}, "c": {"type": "object"}}}
TOOL = {"name": "f", "input_schema": SCHEMA}
FUNCTION = {"name": "f", "parameters": SCHEMA}


def with_nulls(value: Any, keep_id: bool) -> Any:
    """Arguments with their keys in another order and nulls; where the id stays, also with defaults and trimmed."""
    if not isinstance(value, dict):
        return value.strip() if keep_id and isinstance(value, str) else value
    added = {"nothing": None} | ({"all": False} if keep_id else {})
    return added | {key: with_nulls(value[key], keep_id) for key in sorted(value)}


class Messages:
    """An agent that speaks the Messages API; the others differ in the form of what they send.

    The methods that are changes of an answer keep what it says, but for ``edited``.
    """

    tools: Wire = [TOOL]  # noqa: RUF012
    lossy = ("drop_reasoning", "drop_text", "trim", "parts", "arguments", "rename", "apart")

    def body(self, history: Wire) -> dict[str, Any]:
        return {"messages": history, "tools": self.tools, "max_tokens": 90}

    def user(self, text: str) -> Wire:
        return [{"role": "user", "content": text}]

    def answer(self, message: dict[str, Any]) -> Wire:
        return [{"role": "assistant", "content": message["content"]}]

    def results(self, answer: Wire, text: str) -> Wire:
        uses = [block for one in answer for block in self._blocks(one) if block["type"] == "tool_use"]
        return (
            self.user([{"type": "tool_result", "tool_use_id": u["id"], "content": text} for u in uses]) if uses else []
        )

    def _blocks(self, message: dict[str, Any]) -> Wire:
        return message["content"] if isinstance(message["content"], list) else []

    def drop_reasoning(self, answer: Wire) -> None:
        kept = [block for block in answer[0]["content"] if block["type"] != "thinking"]
        answer[0]["content"] = kept or [{"type": "text", "text": ""}]

    def drop_text(self, answer: Wire) -> None:
        blocks = answer[0]["content"]
        if any(block["type"] == "tool_use" for block in blocks):
            answer[0]["content"] = [block for block in blocks if block["type"] != "text"]

    def trim(self, answer: Wire) -> None:
        for block in answer[0]["content"]:
            if block["type"] == "text":
                block["text"] = block["text"].strip() + "\n"

    def parts(self, answer: Wire) -> None:
        cut = [
            [{"type": "text", "text": part} for part in (block["text"][:2], block["text"][2:])]
            if block["type"] == "text"
            else [block]
            for block in answer[0]["content"]
        ]
        answer[0]["content"] = list(itertools.chain(*cut))

    def arguments(self, answer: Wire) -> None:
        for block in answer[0]["content"]:
            if block["type"] == "tool_use":
                block["input"] = with_nulls(block["input"], not block["id"].startswith("renamed"))

    def rename(self, answer: Wire) -> None:
        for number, block in enumerate(answer[0]["content"]):
            if block["type"] == "tool_use":
                block["id"] = f"renamed_{number}"

    def apart(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": [block]} for block in answer[0]["content"]]

    def edited(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": [{"type": "text", "text": "edited"}]}]


class Chat(Messages):
    tools: Wire = [{"type": "function", "function": FUNCTION}]  # noqa: RUF012
    lossy = (*Messages.lossy, "inline")

    def answer(self, message: dict[str, Any]) -> Wire:
        return [message]

    def results(self, answer: Wire, text: str) -> Wire:
        calls = [call for one in answer for call in one.get("tool_calls") or []]
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]

    def drop_reasoning(self, answer: Wire) -> None:
        answer[0].pop("reasoning_content", None)

    def inline(self, answer: Wire) -> None:
        if isinstance(answer[0].get("content"), str) and answer[0].get("reasoning_content"):
            thought = answer[0].pop("reasoning_content")
            answer[0]["content"] = f"<think>\n{thought}\n</think>\n\n{answer[0]['content']}"

    def drop_text(self, answer: Wire) -> None:
        if answer[0].get("tool_calls"):
            answer[0].pop("content")

    def trim(self, answer: Wire) -> None:
        if isinstance(answer[0].get("content"), str):
            answer[0]["content"] = answer[0]["content"].strip() + "\n"

    def parts(self, answer: Wire) -> None:
        if isinstance(text := answer[0].get("content"), str):
            answer[0]["content"] = [{"type": "text", "text": part} for part in (text[:2], text[2:])]

    def arguments(self, answer: Wire) -> None:
        for call in answer[0].get("tool_calls") or []:
            given = with_nulls(json.loads(call["function"]["arguments"]), not call["id"].startswith("renamed"))
            call["function"]["arguments"] = json.dumps(given, separators=(",", ":"), ensure_ascii=False)

    def rename(self, answer: Wire) -> None:
        for number, call in enumerate(answer[0].get("tool_calls") or []):
            call["id"] = f"renamed_{number}"

    def apart(self, answer: Wire) -> None:
        calls = answer[0].pop("tool_calls", None)
        if calls:
            answer.append({"role": "assistant", "content": None, "tool_calls": calls})

    def edited(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": "edited"}]


class Responses(Messages):
    tools: Wire = [{"type": "function", **FUNCTION}]  # noqa: RUF012
    lossy = ("drop_reasoning", "drop_text", "trim", "parts", "arguments", "rename")

    def body(self, history: Wire) -> dict[str, Any]:
        return {"input": history, "tools": self.tools}

    def answer(self, message: dict[str, Any]) -> Wire:
        return list(message["items"])

    def results(self, answer: Wire, text: str) -> Wire:
        calls = [item for item in answer if item["type"] == "function_call"]
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": text} for call in calls]

    def drop_reasoning(self, answer: Wire) -> None:
        answer[:] = [item for item in answer if item["type"] != "reasoning"] or [
            {"role": "assistant", "content": "", "type": "message"}
        ]

    def drop_text(self, answer: Wire) -> None:
        if any(item["type"] == "function_call" for item in answer):
            answer[:] = [item for item in answer if item["type"] != "message"]

    def trim(self, answer: Wire) -> None:
        for item in answer:
            item.pop("status", None)
            if item["type"] == "message" and isinstance(item["content"], list):
                item["content"] = item["content"][0]["text"].strip()

    def parts(self, answer: Wire) -> None:
        for item in answer:
            if item["type"] == "message" and isinstance(text := item["content"], str):
                item["content"] = [{"type": "output_text", "text": part} for part in (text[:2], text[2:])]

    def arguments(self, answer: Wire) -> None:
        for item in answer:
            if item["type"] == "function_call":
                given = with_nulls(json.loads(item["arguments"]), not item["call_id"].startswith("renamed"))
                item["arguments"] = json.dumps(given, separators=(",", ":"), ensure_ascii=False)

    def rename(self, answer: Wire) -> None:
        for number, item in enumerate(answer):
            item.pop("id", None)
            if item["type"] == "function_call":
                item["call_id"] = f"renamed_{number}"

    def edited(self, answer: Wire) -> None:
        answer[:] = [{"role": "assistant", "content": "edited", "type": "message"}]


AGENTS = {"messages": Messages(), "chat": Chat(), "responses": Responses()}


@functools.cache
def gateway_of(kind: type[BaseAdapter], how: tuple[bool, bool, bool]) -> BaseAdapter:
    return kind(tokenizer=Template(*how), sglang_url="http://nowhere")


@dataclass
class Step:
    """One step of the agent: its edit before the next request, and the model's answer.

    ``how``: ``on`` (results of calls, or a question), ``user`` (a question as well), ``edit`` (of the last answer),
    ``branch`` (on from an earlier answer), ``compact`` (a new conversation), ``again`` (the same request). ``changes``
    are lossy ones, of the last answer.
    """

    how: str
    changes: list[str]
    thought: str
    text: str
    calls: list[dict[str, Any]]
    space: str
    compact: bool
    choice: int
    cut: bool = False

    def output(self) -> str:
        separators = (",", ":") if self.compact else None
        said = "".join(call_text("f", one, self.space, separators) for one in self.calls)
        return (f"<think>{self.thought}</think>" if self.thought else "") + self.text + said


@dataclass
class Played:
    """A turn, and the truth of it: ``after`` are the numbers of the turns whose answers its history has, in order;
    ``edits`` says that the last of them is one that the agent has edited, or that is not whole."""

    messages: list[dict[str, Any]]
    said: dict[str, Any]
    turn: TurnRecord
    after: tuple[int, ...]
    edited: frozenset[int]
    metadata: dict[str, Any] = field(default_factory=dict)


def played(
    protocol: str, how: tuple[bool, bool, bool], steps: list[Step], manager: TrajectoryManager
) -> Iterator[Played]:
    """Run an agent; every turn is recorded in ``manager`` before the next."""
    agent, gateway = AGENTS[protocol], gateway_of(AnthropicAdapter if protocol == "messages" else OpenAIAdapter, how)
    template = gateway.tokenizer
    api: ProviderFormat = ResponsesFormat() if protocol == "responses" else gateway
    numbers = itertools.count(1)
    states: list[tuple[Wire, Wire, Played]] = []
    for step in steps:
        asked, after, edited = agent.user(f"q{step.choice}"), (), frozenset[int]()
        if states and step.how != "compact":
            number = len(states) - 1 if step.how != "branch" else step.choice % len(states)
            before, answer, last = copy.deepcopy(states[number][:2]) + (states[number][2],)
            after, edited = last.after, last.edited
            if step.how == "again":
                asked = before
            else:
                after = (*after, number)
                for change in sorted(step.changes, key=["rename", *agent.lossy].index):
                    getattr(agent, change)(answer)
                done = agent.results(answer, str(step.choice))
                if step.how == "edit":
                    agent.edited(answer)
                    done, edited = [], edited | {number}
                asked = [*before, *answer, *(done if done and step.how != "user" else [*done, *asked])]
        body = json.loads(json.dumps(agent.body(asked)))
        sent, tools = api.translate(body)
        messages, known = manager.follow("s", sent)
        prompt, rendering = gateway.text._prompt(messages, tools, known)
        output = template.encode(step.output()) + ([] if step.cut else [template.eos_token_id])
        turn = TurnRecord(prompt, output, "length" if step.cut else "stop", [-next(numbers) / 1e6 for _ in output])
        parsed = gateway.text._parse(turn, tools)
        message = api.reply_message(Reply(parsed.reasoning, parsed.text, parsed.tool_uses, "stop", 0, 0), body)
        said = api.translate_reply(message)
        one = Played(messages, said, turn, after, edited)
        manager.record_turn(
            "s", turn=turn, prompt_messages=messages, response_message=said, metadata={RENDERING: rendering}
        )
        states.append((asked, agent.answer(json.loads(json.dumps(message))), one))
        yield one
