"""Environments: the class that a user writes, its task, the result of a step; and one that calls tools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slime.arguments.args import Args
from slime.arguments.files.environments import environments_of
from slime.rollout.environments.tools import (
    Content,
    Tool,
    ToolCall,
    ToolError,
    ToolRegistry,
    parse_tool_calls,
    without_images,
)
from slime.utils.types import Sample

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """The task of one episode. The samples of a group have the same task: their rewards are compared.

    ``difficulty`` is a level from 0, ``seed`` is for tasks that are made up on the spot. ``prompt``, ``label`` and
    ``metadata`` are those of the sample (empty where there is no prompt file). ``options`` are the entry's of
    ``--environment-config``.
    """

    environment: str
    difficulty: int
    seed: int
    prompt: str | Messages = ""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluation: bool = False


@dataclass
class Step:
    """The result of an action. ``observation`` goes through ``format_observation``; rewards of an episode are added up.

    ``tool_calls`` and ``tool_errors`` are counted for metrics.
    """

    observation: Any = None
    reward: float = 0.0
    done: bool = False
    tool_calls: int = 0
    tool_errors: int = 0


class Environment:
    """One episode: made, ``reset``, stepped until it is done or out of turns, and closed in any case.

    Every method may be a coroutine function. A plain one runs in a thread, one at a time per episode. What a method
    raises, and a method that takes longer than ``step_timeout``, is a failure of the environment: the sample is
    ABORTED, without a reward, and its group is drawn again.
    """

    tools: ToolRegistry | None = None
    """The tools whose schemas the chat template gets; set here or in ``reset``."""

    def __init__(self, args: Args, task: Task) -> None:
        self.args = args
        self.task = task

    @classmethod
    def check(cls, args: Args, options: Mapping[str, Any]) -> Awaitable[None] | None:
        """Check once, before the run, that the services of episodes can be reached; what it raises ends the run."""
        return None

    def reset(self) -> str | Messages | Awaitable[str | Messages | None] | None:
        """Begin, and return the prompt: chat messages, or a text that is used as it is. None: that of the sample."""
        return None

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Return what ``action`` leads to: the text of the model's turn, without the tokens that ended it."""
        raise NotImplementedError(f"{type(self).__name__} has no method step")

    def format_observation(self, observation: Any) -> str | dict[str, Any] | Messages:
        """Return how the model sees an observation: one message or several of the chat, or a text.

        Messages end the model's message and begin its next one; a text is appended to the message as it is. Images are
        parts ``{"type": "image", "image": ...}`` of a message's content, with ``--multimodal-keys``.
        """
        return {"role": "user", "content": str(observation)}

    def cut_off(self) -> float | Awaitable[float]:
        """Return what is added to the reward of an episode that is cut before a step was ``done``."""
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; called once, also after a failure or a cancellation."""
        return None


def task_of(sample: Sample, name: str, start: int, options: Mapping[str, Any], evaluation: bool) -> Task:
    """Return the task of ``sample``, with the difficulty ``start`` unless its metadata has another."""
    metadata = sample.metadata or {}
    number = sample.group_index if sample.group_index is not None else sample.index
    return Task(
        environment=name,
        difficulty=int(metadata.get("difficulty", start)),
        seed=int(metadata.get("seed", number or 0)),
        prompt=sample.prompt,
        label=sample.label,
        metadata=metadata,
        options=options,
        evaluation=evaluation,
    )


class ToolEnvironment(Environment):
    """Calls tools until a turn has no call in it, which is the answer: ``answer`` rewards it.

    ``functions`` are the tools: plain functions, coroutine functions or ``Tool``; methods of an episode of its own are
    added to ``tools`` in ``__init__``. ``reset`` adds the tools of ``mcp_servers``. The calls of one turn run
    concurrently.
    """

    functions: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()

    def __init__(self, args: Args, task: Task) -> None:
        super().__init__(args, task)
        self.tools: ToolRegistry = ToolRegistry(self.functions)

    async def reset(self) -> str | Messages | None:
        """Add the tools of the MCP servers; a subclass that has a ``reset`` calls this one first."""
        if servers := environments_of(self.args)[self.task.environment].mcp_servers:
            from slime.rollout.environments.mcp_tools import tools_of_server  # the package mcp is optional

            for server in servers:
                for tool in await tools_of_server(server):
                    self.tools.add(tool)
        return None

    def parse(self, action: str) -> list[ToolCall | ToolError]:
        """Return the tool calls of a turn; none: it is the answer."""
        return parse_tool_calls(action)

    def answer(self, text: str) -> float:
        """Return the reward of a turn without a tool call."""
        raise NotImplementedError(f"{type(self).__name__} has no method answer")

    async def step(self, action: str) -> Step:
        """Run the tool calls of ``action``, or end the episode with it."""
        calls = self.parse(action)
        if not calls:
            return Step(reward=float(self.answer(action)), done=True)
        results = await asyncio.gather(*map(self._result, calls))
        errors = sum(failed for _, failed in results)
        return Step([content for content, _ in results], tool_calls=len(calls), tool_errors=errors)

    def format_observation(self, observation: list[Any]) -> str | dict[str, Any] | Messages:
        """Return a message of the role tool per result."""
        return [{"role": "tool", "content": content} for content in observation]

    async def _result(self, call: ToolCall | ToolError) -> tuple[Content, bool]:
        try:
            if isinstance(call, ToolError):
                raise call
            content = await self.tools.call(call)
            return content if self.args.multimodal_keys else without_images(content), False
        except ToolError as e:
            return f"error: {e}", True
