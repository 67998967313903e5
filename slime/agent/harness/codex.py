"""Codex."""

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


class CodexHarness(BaseHarness):
    """``codex exec``, without questions, in front of an ``OpenAIAdapter``.

    It speaks the Responses API.

    Environment: ``SLIME_AGENT_CODEX_TARBALL`` (its npm package), ``SLIME_AGENT_CODEX_EXTRA_ARGS``,
    ``SLIME_AGENT_CODEX_EXTRA_ENVS`` (a JSON object).
    """

    async def install_cli(self, sb: Sandbox) -> None:
        package = os.environ.get("SLIME_AGENT_CODEX_TARBALL") or "@openai/codex"
        await install_npm_cli(sb, npm_package=package, check_cmd="codex --version")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        quoted = json.dumps  # a basic string of TOML is written like one of JSON
        lines = [
            f"model = {quoted(ctx.model_label)}",
            'model_provider = "slime"',
            "",
            "[model_providers.slime]",
            'name = "slime"',
            f"base_url = {quoted(f'{ctx.adapter_url}/v1')}",
            'wire_api = "responses"',
            "requires_openai_auth = false",
            'env_key = "OPENAI_API_KEY"',
            "",
        ]
        await sb.exec(f"mkdir -p {HOME_OF_AGENT}/.codex", user=AGENT_USER, check=True)
        await sb.write_file(f"{HOME_OF_AGENT}/.codex/config.toml", "\n".join(lines), user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        cmd = "codex exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            **extra_envs("SLIME_AGENT_CODEX_EXTRA_ENVS"),
        }
        cmd += f"{extra_args('SLIME_AGENT_CODEX_EXTRA_ARGS')} -"
        return await run_agent(
            sb, workdir=ctx.workdir, start_cmd=cmd, env=env, time_budget_sec=time_budget_sec, prompt=prompt
        )
