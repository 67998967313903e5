r"""Problems of Geometry3K with a tool that checks an answer before it is given."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.rollout.environments import ToolError
from slime.rollout.environments.tools import parse_tool_calls
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.types import Sample

NAME = "calc_score"
_ANSWER = {"type": "string", "description": "an answer to the problem, in LaTeX"}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Say whether an answer to the problem is right.",
        "parameters": {"type": "object", "properties": {"answer": _ANSWER}, "required": ["answer"]},
    },
}


class Geo3k:
    r"""A turn without a call ends the episode. The reward is that of ``--rm-type math``, for the last ``\boxed{}``."""

    def __init__(self, sample: Sample) -> None:
        self.label = str(sample.label)

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """There is nothing to show but the prompt."""
        return None, {}

    def step(self, text: str) -> tuple[str | None, bool, dict[str, Any]]:
        """Return what the first call of a turn tells, whether that was the answer, and nothing more."""
        calls = parse_tool_calls(text)
        if not calls:
            return None, True, {}
        call = calls[0]
        if isinstance(call, ToolError):
            return f"error: {call}", False, {}
        if call.name != NAME or not isinstance(call.arguments.get("answer"), str):
            return f'error: expected {{"name": "{NAME}", "arguments": {{"answer": "..."}}}}', False, {}
        right = grade_answer_verl(f"\\boxed{{{call.arguments['answer']}}}", self.label)
        said = "That is right: give it as the final answer." if right else "That is wrong: look for the mistake."
        return said, False, {"right": bool(right)}

    def format_observation(self, observation: str) -> dict[str, Any]:
        """Return the message of the tool."""
        return {"role": "tool", "content": observation}

    def close(self) -> None:
        """There is nothing to release."""


def build_env(sample: Sample, args: Namespace) -> Geo3k:
    """Return the environment of one sample."""
    return Geo3k(sample)
