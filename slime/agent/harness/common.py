"""The base of harnesses, which install an agent in a new sandbox, point it to the gateway and run it."""

from __future__ import annotations

import abc
import asyncio
import json
import logging
import os
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.agent.sandbox import AGENT_USER, EXIT_TIME_BUDGET_EXCEEDED, Sandbox, ensure_agent_user, exec_and_wait
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

NODE_VERSION = "v22.12.0"
NODE_HOME = "/opt/node22"
NPM_ATTEMPTS, NPM_PAUSE_S = 3, 2.0
COMMAND_NOT_FOUND = 127
INSTALL_TIMEOUT_S = 900
HOME_OF_AGENT = f"/home/{AGENT_USER}"


@dataclass(frozen=True)
class HarnessContext:
    """One run of an agent: where it works, its session, the gateway's address, the model's name in requests."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class _HarnessMeta(SingletonMeta, abc.ABCMeta):
    """Harnesses hold no state: one of each serves all runs."""


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


async def install_node22(sb: Sandbox, tarball: str | Path | None = None) -> None:
    """Install Node 22 in ``/opt/node22``, with links in ``/usr/local/bin``, unless that or a newer one is installed.

    It comes from ``tarball``, a file of this machine (an archive of Node's own), from the one that the variable
    ``SLIME_AGENT_NODE_TARBALL`` names, or from nodejs.org.
    """
    code, version, _ = await sb.exec("node --version")
    major = version.strip().removeprefix("v").partition(".")[0]
    if code == 0 and major.isdigit() and int(major) >= 22:
        return
    tarball = tarball or os.environ.get("SLIME_AGENT_NODE_TARBALL")
    if tarball:
        await sb.write_file("/tmp/node.tar", Path(tarball))
    else:
        machine = 'case "$(uname -m)" in aarch64|arm64) echo arm64;; *) echo x64;; esac'
        url = f"https://nodejs.org/dist/{NODE_VERSION}/node-{NODE_VERSION}-linux-$({machine}).tar.gz"
        await sb.exec(f'curl -fsSL -o /tmp/node.tar "{url}"', check=True, timeout=INSTALL_TIMEOUT_S)
    unpack = f"mkdir -p {NODE_HOME} && tar -xf /tmp/node.tar -C {NODE_HOME} --strip-components=1"
    links = f"ln -sf {NODE_HOME}/bin/node {NODE_HOME}/bin/npm {NODE_HOME}/bin/npx /usr/local/bin/"
    await sb.exec(f"{unpack} && {links}", check=True, timeout=INSTALL_TIMEOUT_S)


async def install_npm_cli(
    sb: Sandbox, *, node_runtime: str | Path | None = None, npm_package: str | Path, check_cmd: str
) -> None:
    """Install a command-line tool unless ``check_cmd`` succeeds, and before it Node from ``node_runtime``
    (``install_node22``).

    ``npm_package`` is the name of a package of npm's registry, or a ``.tgz`` or ``.tar.gz`` of this machine (``npm
    pack`` makes one). Raises RuntimeError when ``check_cmd`` still fails after three attempts.
    """
    code, _, _ = await sb.exec(check_cmd)
    if code == 0:
        return
    await install_node22(sb, node_runtime)
    source = str(npm_package)
    if source.endswith((".tgz", ".tar.gz")):
        source = "/tmp/npm-package.tgz"
        await sb.write_file(source, Path(npm_package))
    # not where Node is: its bin directory is on no path
    install = f"npm install --global --prefix /usr/local {shlex.quote(source)}"
    for attempt in range(NPM_ATTEMPTS):
        await asyncio.sleep(NPM_PAUSE_S if attempt else 0)
        code, out, err = await sb.exec(f"{install} && {check_cmd}", timeout=INSTALL_TIMEOUT_S)
        if code == 0:
            return
    raise RuntimeError(
        f"{npm_package} could not be installed in sandbox {sb.sandbox_id} in {NPM_ATTEMPTS} attempts; the last one "
        f"({install} && {check_cmd}) ended with {code}: {(err or out)[-2000:]}"
    )


async def run_agent(
    sb: Sandbox,
    *,
    workdir: str,
    start_cmd: str,
    env: Mapping[str, str],
    time_budget_sec: float,
    prompt: str | None = None,
) -> int:
    """Run ``start_cmd`` in the work directory as the user ``agent``, with ``prompt`` on its standard input if it is
    given.

    Its output is kept in ``<workdir>/.harness/trajectory.jsonl``. Returns its exit code, -1 after
    ``time_budget_sec``.
    """
    logs = f"{workdir}/.harness"
    await sb.exec(f"mkdir -p {shlex.quote(logs)}", user=AGENT_USER, check=True)
    await sb.write_file(f"{logs}/.gitignore", "*\n", user=AGENT_USER)  # no part of what the agent changed
    if prompt is not None:
        await sb.write_file(f"{logs}/prompt.txt", prompt, user=AGENT_USER)
        start_cmd = f"{start_cmd} < {shlex.quote(logs + '/prompt.txt')}"
    code, tail = await exec_and_wait(
        sb,
        cmd=start_cmd,
        time_budget_sec=time_budget_sec,
        tag=f"agent-{uuid.uuid4().hex[:12]}",
        user=AGENT_USER,
        env={"HOME": HOME_OF_AGENT, **env},
        workdir=workdir,
        out_file=f"{logs}/trajectory.jsonl",
    )
    if code == EXIT_TIME_BUDGET_EXCEEDED:
        logger.info("sandbox %s: the agent was not done within %g s", sb.sandbox_id, time_budget_sec)
    elif code != 0:
        hint = " (not installed? install_cli comes before run)" if code == COMMAND_NOT_FOUND else ""
        logger.warning("sandbox %s: the agent ended with %d%s; its output ends: %s", sb.sandbox_id, code, hint, tail)
    return code


def extra_args(name: str) -> str:
    """The words of the environment variable ``name``, ready for a command line."""
    return "".join(f" {shlex.quote(word)}" for word in shlex.split(os.environ.get(name, "")))


def extra_envs(name: str) -> dict[str, str]:
    """The variables in the JSON object of the environment variable ``name``."""
    text = os.environ.get(name) or "{}"
    try:
        values = json.loads(text)
    except ValueError as e:
        raise ValueError(f"{name} must be a JSON object of variables, but {text!r} is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a JSON object of variables, not {text!r}")
    return {str(key): str(value) for key, value in values.items()}
