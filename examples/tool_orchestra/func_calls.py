"""Tasks of the category ``func_call``: tools of a domain and a user, whose next action an expert may choose."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.tool_orchestra.experts import Experts, working
from examples.tool_orchestra.questions import call_in, schemas
from examples.tool_orchestra.settings import Settings, Task
from slime.rollout.environments.tools import ToolCall, ToolError, parse_tool_calls

logger = logging.getLogger(__name__)

CALL_EXPERT = {"call_expert": "Have a model choose what to do next: what it says or calls is done."}
USER = "message"
HOW = (
    f"Call one tool, or say something to the user in <{USER}> and </{USER}>; with call_expert a model chooses what is "
    "called or said."
)


class Domain(Protocol):
    """An environment of one task. Its methods may raise what they like: that aborts the execution."""

    tools: list[dict[str, Any]]
    """As chat templates take them; from ``reset`` on."""

    async def reset(self) -> str:
        """Return the policy of the domain, with the first message of the user."""

    async def call(self, name: str, arguments: dict[str, Any]) -> str | None:
        """Return what a tool answers, or None when the conversation is over; what is wrong with a call is an answer
        too."""

    async def say(self, text: str) -> str | None:
        """Return what the user replies, or None when the conversation is over."""

    async def reward(self) -> float:
        """Return 1 when the task is done, else 0."""

    async def close(self) -> None:
        """Release what the task holds; called whatever has happened."""


@dataclass
class FunctionCalls:
    """The state of one execution; ``known`` is what has happened."""

    args: Namespace
    settings: Settings
    task: Task
    domain: Domain
    known: list[str] = field(default_factory=list)
    correct: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        self.experts = Experts(self.args, self.settings, self.task)

    @property
    def max_turns(self) -> int:
        """Largest number of turns of the orchestrator."""
        return self.settings.func_call_turns

    async def begin(self) -> None:
        """Read the first message."""
        self.known = [await working("the domain", self.domain.reset())]

    def prompt(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages of the next turn, and the tools."""
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        text = "\n\n".join(filter(None, [self.task.problem, HOW, *self.known]))
        return [*system, {"role": "user", "content": text}], [*schemas(self.task, CALL_EXPERT), *self.domain.tools]

    async def step(self, text: str) -> bool:
        """Do what a turn says; return whether it could be read."""
        expert = call_in(text, self.task, CALL_EXPERT)
        if expert is None:
            return await self._act(text)
        messages, tools = self.prompt()
        said = await self.experts.ask(expert[1], messages, tools=tools[len(CALL_EXPERT) :])
        for call in said.get("tool_calls") or []:
            if self.answered:
                break
            arguments = call["function"]["arguments"]
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            await self._call(call["function"]["name"], given)
        if not said.get("tool_calls"):
            await self._say(said.get("content") or "")
        return True

    async def _act(self, text: str) -> bool:
        calls = parse_tool_calls(text)
        if calls and isinstance(calls[0], ToolCall):
            await self._call(calls[0].name, calls[0].arguments)
            return True
        opened, closed = f"<{USER}>", f"</{USER}>"
        message = text.rpartition("</think>")[2].partition(opened)[2].partition(closed)[0].strip()
        if (calls and isinstance(calls[0], ToolError)) or not message:
            return False
        await self._say(message)
        return True

    async def close(self) -> None:
        """End the task. What goes wrong is logged: it does not change what was done."""
        try:
            await self.domain.close()
        except Exception:
            logger.exception("the domain of a task could not be closed")

    async def _call(self, name: str, arguments: dict[str, Any]) -> None:
        answer = await working("the domain", self.domain.call(name, arguments))
        self.known.append(f"Called {name} {json.dumps(arguments)}:\n{answer or ''}")
        await self._end_unless(answer)

    async def _say(self, text: str) -> None:
        reply = await working("the user", self.domain.say(text))
        self.known.append(f"Said to the user:\n{text}")
        if reply is not None:
            self.known.append(f"The user said:\n{reply}")
        await self._end_unless(reply)

    async def _end_unless(self, answer: str | None) -> None:
        if answer is None:
            self.answered, self.correct = True, await working("the domain", self.domain.reward()) == 1.0
