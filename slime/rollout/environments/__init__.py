"""Environments: episodes of several turns with tools, above the custom generate function.

``generate`` is for ``--custom-generate-function-path``, ``EnvironmentDataSource`` for ``--data-source-path``; the rest
is what the classes that ``--environment-path`` and ``--environment-config`` name are made of.
"""

from slime.rollout.environments.data_source import EnvironmentDataSource
from slime.rollout.environments.environment import Environment, Step, Task, ToolEnvironment
from slime.rollout.environments.episode import generate
from slime.rollout.environments.tools import Tool, ToolCall, ToolError, ToolRegistry, tool_of

__all__ = [
    "Environment",
    "EnvironmentDataSource",
    "Step",
    "Task",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "ToolRegistry",
    "generate",
    "tool_of",
]
