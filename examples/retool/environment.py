r"""Solve a problem of mathematics with a Python interpreter: turns of code, results, and ``Answer: \boxed{...}``."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from examples.retool.interpreter import MODULES, interpret
from slime.rollout.environments import Environment, Step, Task, Tool, ToolError, ToolRegistry
from slime.rollout.environments.environment import Messages
from slime.rollout.environments.tools import parse_tool_calls
from slime.rollout.rm_hub.answer_text import without_end_tokens
from slime.rollout.rm_hub.math_dapo_utils import compute_score

NAME = "code_interpreter"
_ANSWER = re.compile(r"Answer:\s*\\boxed\{")
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCED = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)


def code_in(action: str) -> str | ToolError | None:
    """Return the code of a turn: of a ``<tool_call>``, else of ``<code>``, else of a fence; a ToolError for a call that
    cannot be read. None without code, and for a turn with an answer."""
    if _ANSWER.search(action):
        return None
    for call in parse_tool_calls(action):
        if isinstance(call, ToolError):
            return call
        if call.name != NAME or not isinstance(call.arguments.get("code"), str):
            return ToolError(f'expected {{"name": "{NAME}", "arguments": {{"code": "..."}}}}')
        return str(call.arguments["code"])
    found = _CODE.search(action) or _FENCED.search(action)
    return found[1].strip() if found else None


def score(text: str, label: Any, calls: int) -> float:
    """Return 1 for the right answer in a box at the end; else -1, or up to -0.6 with calls of the interpreter."""
    strict = float(compute_score(without_end_tokens(text), label, strict_box_verify=True)["score"])
    return strict if strict > 0 else min(-0.6, strict + (calls - 2) / 2 * 0.1)


class Retool(Environment):
    """``options``: ``max_calls`` (16), ``cpu_s`` (20), ``memory_gib`` (4), an ``instruction`` before the prompt, and
    ``binary`` for rewards of 1 and 0.

    Results are written into the model's own message as ``<interpreter>``: let ``--rollout-stop`` end turns at
    ``</code>`` and ``</tool_call>``. A turn without code is the last one.
    """

    def __init__(self, args: Namespace, task: Task) -> None:
        super().__init__(args, task)
        code = {"type": "string", "description": f"Python 3 code that prints results; modules: {', '.join(MODULES)}"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        self.tools = ToolRegistry([Tool(NAME, "Run Python code and return what it prints.", parameters, self._run)])
        self.said = ""
        self.calls = 0

    def reset(self) -> Messages | None:
        instruction = self.task.options.get("instruction")
        if instruction is None:
            return None
        prompt = self.task.prompt
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [{"role": "system", "content": instruction}, *asked]

    async def _run(self, arguments: dict[str, Any]) -> tuple[str, bool]:
        options = self.task.options
        memory = int(options.get("memory_gib", 4) * 2**30)
        return await interpret(arguments["code"], cpu_s=float(options.get("cpu_s", 20)), memory_bytes=memory)

    async def step(self, action: str) -> Step:
        self.said += action
        code = code_in(action)
        if code is None:
            return Step(reward=self._score(), done=True)
        if self.calls >= self.task.options.get("max_calls", 16):
            return Step("no calls are left; answer now", tool_calls=1, tool_errors=1)
        self.calls += 1
        text, failed = (f"error: {code}", True) if isinstance(code, ToolError) else await self._run({"code": code})
        return Step(text, tool_calls=1, tool_errors=int(failed))

    def format_observation(self, observation: str) -> str:
        text = f"\n\n<interpreter>\n{observation}\n</interpreter>\n\n"
        self.said += text
        return text

    def cut_off(self) -> float:
        return self._score()

    def _score(self) -> float:
        found = score(self.said, self.task.label, self.calls)
        return float(found > 0) if self.task.options.get("binary") else found
