"""Command-line agents, installed and run in a sandbox, with the gateway in the place of their provider."""

from slime.agent.harness.base import BaseHarness, HarnessContext
from slime.agent.harness.claude_code import ClaudeCodeHarness
from slime.agent.harness.codex import CodexHarness

__all__ = ["BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext"]
