"""Claude Code."""

from __future__ import annotations

import json
import os

from slime.agent.harness.common import (
    HOME_OF_AGENT,
    BaseHarness,
    HarnessContext,
    extra_args,
    extra_envs,
    install_npm_cli,
    run_agent,
)
from slime.agent.sandbox import AGENT_USER, Sandbox


class ClaudeCodeHarness(BaseHarness):
    """``claude``, without questions, in front of an ``AnthropicAdapter``.

    Environment: ``SLIME_AGENT_CC_TARBALL`` (its npm package), ``SLIME_AGENT_CC_EXTRA_ARGS``,
    ``SLIME_AGENT_CC_EXTRA_ENVS`` (a JSON object).
    """

    async def install_cli(self, sb: Sandbox) -> None:
        package = os.environ.get("SLIME_AGENT_CC_TARBALL") or "@anthropic-ai/claude-code"
        await install_npm_cli(sb, npm_package=package, check_cmd="claude --version")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        config = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True, "autoUpdates": False}
        await sb.write_file(f"{HOME_OF_AGENT}/.claude.json", json.dumps(config), user=AGENT_USER)
        settings = {"permissions": {"defaultMode": "bypassPermissions"}}
        await sb.exec(f"mkdir -p {HOME_OF_AGENT}/.claude", user=AGENT_USER, check=True)
        await sb.write_file(f"{HOME_OF_AGENT}/.claude/settings.json", json.dumps(settings), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        cmd = "claude --print --verbose --output-format stream-json --dangerously-skip-permissions"
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_label,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line in the system prompt that no two requests share
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **extra_envs("SLIME_AGENT_CC_EXTRA_ENVS"),
        }
        cmd += extra_args("SLIME_AGENT_CC_EXTRA_ARGS")
        return await run_agent(
            sb, workdir=ctx.workdir, start_cmd=cmd, env=env, time_budget_sec=time_budget_sec, prompt=prompt
        )
