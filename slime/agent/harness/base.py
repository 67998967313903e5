"""What a harness does: install an agent in a new sandbox, point it to the gateway, run it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from slime.agent.sandbox import Sandbox, ensure_agent_user
from slime.utils.misc import SingletonMeta


@dataclass(frozen=True)
class HarnessContext:
    """One execution: where the agent works, its session, the gateway's address, the model's name in requests."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class _HarnessMeta(SingletonMeta, abc.ABCMeta):
    """Harnesses hold no state: one of each serves all executions."""


class BaseHarness(metaclass=_HarnessMeta):
    """A command-line agent."""

    @abc.abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Make the agent's command available, unless it is. Called once per sandbox, before ``run``."""

    @abc.abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the files that the agent is configured by."""

    @abc.abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the agent on ``prompt``; return its exit code, -1 when it has not ended within its time."""

    async def run(
        self, sb: Sandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: float, prompt: str
    ) -> int:
        """Configure the agent, which ``install_cli`` has installed, and run it in ``workdir``; return its exit code.

        ``adapter_url`` is the gateway's address as the sandbox sees it, without a path.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"))
        await ensure_agent_user(sb, workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
