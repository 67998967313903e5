"""An agent that is a script: it plays turns from a list or a policy, and needs nothing but Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from slime.agent.harness.common import HOME_OF_AGENT, BaseHarness, HarnessContext, run_agent
from slime.agent.sandbox import AGENT_USER, Sandbox

PLAYER = Path(__file__).with_name("scripted_player.py")
FILES = f"{HOME_OF_AGENT}/.slime-scripted"


class ScriptedHarness(BaseHarness):
    """Sends the prompt, and after each answer the next message, to an ``OpenAIAdapter`` in plain HTTP.

    Derive from it and set:

    turns: user messages, one after each answer; the session ends when there is none left.
    policy: in place of them, Python source (text, or a Path to it) that defines ``act(reply, messages)``. It runs in
    the sandbox's work directory and is given the model's message and all so far; it returns the next user message, a
    list of messages such as tool results, or None for the end. A list ``TOOLS`` beside it is sent as the tools.
    max_turns: answers at most. request: more fields of every request, such as the temperature.

    The exit code is 0 at the end of the script, 1 when a request or the policy fails, 3 when the turns are used up.
    Each message of the model is a line of JSON in the log.
    """

    turns: ClassVar[Sequence[str]] = ()
    policy: ClassVar[str | Path | None] = None
    max_turns: ClassVar[int] = 32
    request: ClassVar[Mapping[str, Any]] = {}

    async def install_cli(self, sb: Sandbox) -> None:
        """Raise RuntimeError where the sandbox has no ``python3``: nothing is installed."""
        code, _, err = await sb.exec("python3 --version", user=AGENT_USER)
        if code != 0:
            raise RuntimeError(f"ScriptedHarness needs python3, which sandbox {sb.sandbox_id} does not have: {err}")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        script = {"turns": list(self.turns), "max_turns": self.max_turns, "request": dict(self.request)}
        await sb.exec(f"mkdir -p {FILES}", user=AGENT_USER, check=True)
        await sb.write_file(f"{FILES}/player.py", PLAYER, user=AGENT_USER)
        await sb.write_file(f"{FILES}/script.json", json.dumps(script), user=AGENT_USER)
        if self.policy is not None:
            await sb.write_file(f"{FILES}/policy.py", self.policy, user=AGENT_USER)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        policy = f" {FILES}/policy.py" if self.policy is not None else ""
        env = {
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1", "OPENAI_API_KEY": ctx.session_id, "SLIME_MODEL": ctx.model_label
        }  # fmt: skip
        cmd = f"python3 {FILES}/player.py {FILES}/script.json{policy}"
        return await run_agent(
            sb, workdir=ctx.workdir, start_cmd=cmd, env=env, time_budget_sec=time_budget_sec, prompt=prompt
        )
