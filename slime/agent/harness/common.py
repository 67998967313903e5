"""What harnesses share: Node, command-line tools from npm, and a run that is logged."""

from __future__ import annotations

import json
import logging
import os
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path

from slime.agent.harness.base import HarnessContext
from slime.agent.sandbox import AGENT_USER, EXIT_TIME_BUDGET_EXCEEDED, Sandbox, exec_and_wait

logger = logging.getLogger(__name__)

NODE_VERSION = "v22.12.0"
INSTALL_TIMEOUT_S = 900
HOME_OF_AGENT = f"/home/{AGENT_USER}"


async def install_node22(sb: Sandbox) -> None:
    """Install Node 22 unless that or a newer one is there: from the file ``SLIME_AGENT_NODE_TARBALL`` of this machine
    (a ``.tar.gz`` of Node's own), or from nodejs.org."""
    code, version, _ = await sb.exec("node --version")
    if code == 0 and _major(version) >= 22:
        return
    tarball = os.environ.get("SLIME_AGENT_NODE_TARBALL")
    if tarball:
        await sb.write_file("/tmp/node.tar.gz", Path(tarball))
    else:
        machine = 'case "$(uname -m)" in aarch64|arm64) echo arm64;; *) echo x64;; esac'
        url = f"https://nodejs.org/dist/{NODE_VERSION}/node-{NODE_VERSION}-linux-$({machine}).tar.gz"
        await sb.exec(f'curl -fsSL -o /tmp/node.tar.gz "{url}"', check=True, timeout=INSTALL_TIMEOUT_S)
    await sb.exec("tar -xzf /tmp/node.tar.gz -C /usr/local --strip-components=1", check=True, timeout=INSTALL_TIMEOUT_S)


async def install_npm_cli(sb: Sandbox, *, binary: str, package: str, tarball_env: str) -> None:
    """Install the command ``binary`` unless it is there, and Node before it: from the file that the variable
    ``tarball_env`` of this machine names (``npm pack`` makes it), or from npm's registry."""
    code, _, _ = await sb.exec(f"command -v {shlex.quote(binary)}")
    if code == 0:
        return
    await install_node22(sb)
    tarball = os.environ.get(tarball_env)
    source = package
    if tarball:
        source = f"/tmp/{binary}.tgz"
        await sb.write_file(source, Path(tarball))
    await sb.exec(f"npm install --global {shlex.quote(source)}", check=True, timeout=INSTALL_TIMEOUT_S)


async def run_agent(
    sb: Sandbox, ctx: HarnessContext, *, cmd: str, prompt: str, env: Mapping[str, str], time_budget_sec: float
) -> int:
    """Run ``cmd`` in the work directory as the user ``agent``, with ``prompt`` on its standard input.

    Its output is kept in ``<workdir>/.harness/trajectory.jsonl``. Returns its exit code, -1 after
    ``time_budget_sec``.
    """
    logs = f"{ctx.workdir}/.harness"
    await sb.exec(f"mkdir -p {shlex.quote(logs)}", user=AGENT_USER, check=True)
    await sb.write_file(f"{logs}/.gitignore", "*\n", user=AGENT_USER)  # no part of what the agent changed
    await sb.write_file(f"{logs}/prompt.txt", prompt, user=AGENT_USER)
    code, tail = await exec_and_wait(
        sb,
        cmd=f"{cmd} < {shlex.quote(logs + '/prompt.txt')}",
        time_budget_sec=time_budget_sec,
        tag=f"agent-{uuid.uuid4().hex[:12]}",
        user=AGENT_USER,
        env={"HOME": HOME_OF_AGENT, **env},
        workdir=ctx.workdir,
        out_file=f"{logs}/trajectory.jsonl",
    )
    if code == EXIT_TIME_BUDGET_EXCEEDED:
        logger.info("session %s: the agent was not done within %g s", ctx.session_id, time_budget_sec)
    elif code != 0:
        logger.warning("session %s: the agent ended with %d; its last words: %s", ctx.session_id, code, tail)
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


def _major(version: str) -> int:
    digits = version.strip().removeprefix("v").partition(".")[0]
    return int(digits) if digits.isdigit() else 0
