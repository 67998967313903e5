"""Domains of tau2-bench for the category ``func_call``: its tools, its user and its reward."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from examples.tau_bench.tau2_world import Tau2World
from examples.tool_orchestra.settings import Settings
from slime.rollout.environments import Step, ToolCall
from slime.rollout.environments.environment import task_of
from slime.utils.types import Sample


class Tau2Domain:
    """A ``Domain``. A row's metadata have ``task_id``, and ``domain`` where it is not that of ``func_call_options``."""

    def __init__(self, args: Namespace, sample: Sample) -> None:
        options = dict(Settings.of(args).func_call_options)
        options |= {name: value for name, value in (sample.metadata or {}).items() if name == "domain"}
        self.world = Tau2World(args, task_of(sample, "func_call", 0, options, evaluation=False))
        self.tools: list[dict[str, Any]] = []
        self.outcome = 0.0

    async def reset(self) -> str:
        opening = await asyncio.to_thread(self.world.open)
        self.tools = [tool.schema() for tool in opening.tools]
        return f"{opening.policy}\n\nThe user said:\n{opening.customer}"

    async def call(self, name: str, arguments: dict[str, Any]) -> str | None:
        return await self._advance(self.world.call, ToolCall(name, arguments))

    async def say(self, text: str) -> str | None:
        return await self._advance(self.world.say, text)

    async def reward(self) -> float:
        return self.outcome

    async def close(self) -> None:
        await asyncio.to_thread(self.world.close)

    async def _advance(self, act: Callable[[Any], Step], what: Any) -> str | None:
        step = await asyncio.to_thread(act, what)
        self.outcome = step.reward
        return None if step.done else str(step.observation["content"])
