"""A customer-service agent between a customer and a database: tool calls, messages, and a policy to keep."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.rollout.environments import Environment, Step, Task, Tool, ToolCall, ToolError, ToolRegistry
from slime.rollout.environments.environment import Messages
from slime.utils.misc import load_function


@dataclass(frozen=True)
class Opening:
    """The first state that the agent sees: the policy ("" for none), its tools, and what the customer says."""

    policy: str
    tools: Sequence[Tool]
    customer: str


class World(Protocol):
    """The customer, the tools and the data of one task; made as ``World(args, task)``.

    The observation of a ``Step`` is a chat message, of the role ``tool`` or ``user``. The reward comes with ``done``.
    """

    def open(self) -> Opening:
        """Begin."""

    def parse(self, action: str) -> list[ToolCall | ToolError]:
        """Return the tool calls of a turn; none: it is said to the customer."""

    def call(self, call: ToolCall) -> Step:
        """Run a tool."""

    def say(self, text: str) -> Step:
        """Return what the customer answers."""

    def close(self) -> None:
        """Release what the task holds."""


def result(content: str, *, failed: bool = False, reward: float = 0.0, done: bool = False) -> Step:
    """Return the step of a tool call."""
    return Step({"role": "tool", "content": content}, reward, done, tool_calls=1, tool_errors=int(failed))


class TauBench(Environment):
    """``options``: ``world``, the dotted path of a ``World``, and what that one reads.

    A turn is either a tool call (of several the first counts) or a message to the customer. Reasoning before
    ``</think>`` is neither. Methods run in threads, so that worlds may block.
    """

    def __init__(self, args: Namespace, task: Task) -> None:
        super().__init__(args, task)
        self.world: World = load_function(task.options["world"])(args, task)

    def reset(self) -> Messages:
        opening = self.world.open()
        self.tools = ToolRegistry(opening.tools) if opening.tools else None
        policy = [{"role": "system", "content": opening.policy}] if opening.policy else []
        return [*policy, {"role": "user", "content": opening.customer}]

    def step(self, action: str) -> Step:
        said = action.rpartition("</think>")[2].strip()
        calls = self.world.parse(said)
        if not calls:
            return self.world.say(said)
        call = calls[0]
        return result(f"error: {call}", failed=True) if isinstance(call, ToolError) else self.world.call(call)

    def format_observation(self, observation: Any) -> dict[str, Any]:
        return dict(observation)

    def close(self) -> None:
        self.world.close()
