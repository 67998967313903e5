"""An environment whose actions are tool calls, and whose last action is an answer."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from slime.arguments.files.environments import environments_of
from slime.rollout.environments.environment import Environment, Messages, Step, Task
from slime.rollout.environments.tools import Tool, ToolCall, ToolError, ToolRegistry, parse_tool_calls


class ToolEnvironment(Environment):
    """Calls tools until a turn has no call in it, which is the answer: ``answer`` rewards it.

    ``functions`` are the tools: plain functions, coroutine functions or ``Tool``; methods of an episode of its own are
    added to ``tools`` in ``__init__``. ``reset`` adds the tools of ``mcp_servers``. The calls of one turn run
    concurrently.
    """

    functions: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()

    def __init__(self, args: Namespace, task: Task) -> None:
        super().__init__(args, task)
        self.tools: ToolRegistry = ToolRegistry(self.functions)

    async def reset(self) -> str | Messages | None:
        """Add the tools of the MCP servers; a class of its own that has a ``reset`` calls this one first."""
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
        return Step([text for text, _ in results], tool_calls=len(calls), tool_errors=errors)

    def format_observation(self, observation: Any) -> str | dict[str, Any] | Messages:
        """Return a message of the role tool per result."""
        return [{"role": "tool", "content": text} for text in observation]

    async def _result(self, call: ToolCall | ToolError) -> tuple[str, bool]:
        try:
            if isinstance(call, ToolError):
                raise call
            return await self.tools.call(call), False
        except ToolError as e:
            return f"error: {e}", True
