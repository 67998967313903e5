"""Command-line agents, installed and run in a sandbox, with the gateway in the place of their provider."""

from slime.agent.harness.claude_code import ClaudeCodeHarness
from slime.agent.harness.codex import CodexHarness
from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.harness.mini_agent import MiniAgentHarness
from slime.agent.harness.scripted import ScriptedHarness

__all__ = [
    "BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext", "MiniAgentHarness", "ScriptedHarness",
]  # fmt: skip
