"""Environments of tests, which name them by dotted path."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, ClassVar

from slime.rollout.environments import Environment, Step, ToolEnvironment, ToolError

CLOSED: list[str] = []


class Guess(Environment):
    """Find a number below 8 in ``limit`` guesses; says higher or lower."""

    def reset(self) -> list[dict[str, Any]]:
        self.number = self.task.seed % 8
        return [{"role": "user", "content": f"level {self.task.difficulty}"}]

    def step(self, action: str) -> Step:
        guess = int(action)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step("higher" if guess < self.number else "lower", reward=-0.125)

    async def cut_off(self) -> float:
        return -2.0

    def close(self) -> None:
        CLOSED.append(self.task.environment)


def add(a: int, b: int = 1) -> int:
    """Add two
    numbers.

    What follows is for programmers.
    """
    return a + b


async def divide(a: float, b: float) -> float:
    """Divide a by b."""
    if b == 0:
        raise ToolError("b is 0")
    return a / b


def broken() -> str:
    """Does not work."""
    raise OSError("disk on fire")


class Calculator(ToolEnvironment):
    """Answer with the label; has tools."""

    functions: ClassVar[tuple[Any, ...]] = (add, divide, broken)

    def answer(self, text: str) -> float:
        return float(text == self.task.label)


class Inline(Environment):
    """Results are written into the model's own message; the episode ends with the word end."""

    async def step(self, action: str) -> Step:
        return Step(action.upper(), done=action.endswith("end"))

    def format_observation(self, observation: str) -> str:
        return f"[{observation}]"


class Slow(Environment):
    """Hangs in the method that the options name."""

    def _hang(self, method: str) -> None:
        if self.task.options["hangs_in"] == method:
            time.sleep(3)

    def reset(self) -> list[dict[str, Any]]:
        self._hang("reset")
        return [{"role": "user", "content": "go"}]

    async def step(self, action: str) -> Step:
        if self.task.options["hangs_in"] == "step":
            await asyncio.sleep(30)
        return Step("on")

    def close(self) -> None:
        CLOSED.append(self.task.environment)


class OfServer(ToolEnvironment):
    """Has the tools of an MCP server."""

    def answer(self, text: str) -> float:
        return float(text == "done")


MCP_SERVER = [
    sys.executable, "-c",
    "from mcp.server.fastmcp import FastMCP\n"
    "import os\n"
    "server = FastMCP('test')\n"
    "@server.tool()\n"
    "def twice(x: int) -> str:\n"
    "    'Return twice x.'\n"
    "    return str(2 * x)\n"
    "@server.tool()\n"
    "def fail() -> str:\n"
    "    raise ValueError('never works')\n"
    "@server.tool()\n"
    "def exit() -> str:\n"
    "    os._exit(3)\n"
    "server.run('stdio')\n",
]  # fmt: skip
