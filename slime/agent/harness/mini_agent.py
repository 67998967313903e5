"""A small coding agent: a shell and an editor over OpenAI's SDK."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from slime.agent.harness.common import HOME_OF_AGENT, INSTALL_TIMEOUT_S, BaseHarness, HarnessContext, run_agent
from slime.agent.sandbox import AGENT_USER, Sandbox

PROGRAM = Path(__file__).with_name("mini_agent_program.py")
FILE = f"{HOME_OF_AGENT}/.slime-mini-agent.py"
_CHECK = """python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("openai") is None)'"""


class MiniAgentHarness(BaseHarness):
    """A program of one file that works with two tools, ``bash`` and ``edit``, in front of an ``OpenAIAdapter``.

    It asks until an answer has no tool call, at most ``max_turns`` times; exit codes are 0, 3 when the turns are used
    up, and 1 when a request fails. The sandbox needs Python 3.9 and the package ``openai``.
    """

    max_turns: ClassVar[int] = 50

    async def install_cli(self, sb: Sandbox) -> None:
        """Install the package ``openai`` unless it is installed. Raises RuntimeError where that fails."""
        code, _, _ = await sb.exec(_CHECK, user=AGENT_USER)
        if code != 0:
            install = f"python3 -m pip install openai && {_CHECK}"
            await sb.exec(install, check=True, timeout=INSTALL_TIMEOUT_S)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        await sb.write_file(FILE, PROGRAM, user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        env = {
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1", "OPENAI_API_KEY": ctx.session_id, "SLIME_MODEL": ctx.model_label
        }  # fmt: skip
        return await run_agent(
            sb, workdir=ctx.workdir, start_cmd=f"python3 {FILE} {self.max_turns}", env=env,
            time_budget_sec=time_budget_sec, prompt=prompt,
        )  # fmt: skip
