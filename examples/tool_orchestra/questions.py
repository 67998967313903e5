"""Tasks of the category ``qa``: search, computation, and a model that answers in the end."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from examples.retool.interpreter import interpret
from examples.search_r1.answers import is_right, targets
from examples.tool_orchestra.experts import Experts, working
from examples.tool_orchestra.settings import Settings, Task
from slime.rollout.environments.tools import ToolCall, ToolError, parse_tool_calls

PURPOSES = {
    "enhance_reasoning": "Have a model write a Python program that computes something; its output is added.",
    "search": "Have a model write a search query; the documents that are found are added.",
    "answer": "Have a model answer the problem. This ends the work.",
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def schemas(task: Task, tools: dict[str, str]) -> list[dict[str, Any]]:
    """Return the tools as chat templates take them; a model's price and latency are in the description."""
    found = []
    for name, purpose in tools.items():
        aliases = task.aliases(name)
        lines = [purpose, *(f"{alias}: {_described(task.pricing.get(task.models[alias], {}))}" for alias in aliases)]
        model = {"type": "string", "enum": aliases, "description": "which model"}
        parameters = {"type": "object", "properties": {"model": model}, "required": ["model"]}
        function = {"name": name, "description": "\n".join(lines), "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


def _described(pricing: Any) -> str:
    words = [f"{pricing[key]:g} per million {key} tokens" for key in ("input", "output") if key in pricing]
    return ", ".join(words + ([f"{pricing['latency']:g} s"] if "latency" in pricing else [])) or "free"


def call_in(text: str, task: Task, tools: dict[str, str]) -> tuple[str, str] | None:
    """Return (tool, model) of the first call of a turn; None when it is none of ``tools`` with one of its models."""
    calls = parse_tool_calls(text)
    if not calls or isinstance(calls[0], ToolError):
        return None
    call: ToolCall = calls[0]
    alias = call.arguments.get("model")
    return (call.name, alias) if call.name in tools and alias in task.aliases(call.name) else None


@dataclass
class Question:
    """The state of one execution; ``known`` is what the tools found."""

    args: Namespace
    settings: Settings
    task: Task
    label: Any
    known: list[str] = field(default_factory=list)
    correct: bool = False
    answered: bool = False

    def __post_init__(self) -> None:
        self.experts = Experts(self.args, self.settings, self.task)

    @property
    def max_turns(self) -> int:
        """Largest number of turns of the orchestrator."""
        return self.settings.max_turns

    async def begin(self) -> None:
        """There is nothing to read."""

    async def close(self) -> None:
        """There is nothing to release."""

    def state(self) -> str:
        """Return the problem with what is known."""
        return "\n\n".join([self.task.problem, *self.known])

    def prompt(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the messages of the next turn, and the tools."""
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        return [*system, {"role": "user", "content": self.state()}], schemas(self.task, PURPOSES)

    async def step(self, text: str) -> bool:
        """Do what a turn asks for; return whether it was a call. Sets ``answered`` and ``correct`` at the end."""
        call = call_in(text, self.task, PURPOSES)
        if call is None:
            return False
        tool, alias = call
        said = await self.experts.say(alias, tool, state=self.state())
        if tool == "search":
            self.known.append("Documents:\n" + "\n".join(await self.experts.documents(said)))
        elif tool == "enhance_reasoning":
            fenced = _FENCE.search(said)
            code = fenced[1] if fenced else said
            run = interpret(code, cpu_s=self.settings.code_s, memory_bytes=4 << 30)
            output, _ = await working("the interpreter", run)
            self.known.append(f"Program:\n{code}\nIts output:\n{output}")
        else:
            found = _ANSWER.findall(said)
            answer = found[-1].strip() if found else said
            self.answered = True
            self.correct = is_right(answer, self.label)
            if not self.correct and self.settings.judge:
                self.correct = await self.experts.judge(targets(self.label)[0], answer)
        return True
