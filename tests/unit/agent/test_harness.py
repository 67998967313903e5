"""Harnesses in a directory of this machine: a command in the agent's place really runs, installs are looked at."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness
from slime.agent.harness.common import install_node22, install_npm_cli, run_agent
from tests.support.local_sandbox import RecordingSandbox

pytestmark = pytest.mark.slow

RUN = {"workdir": "/workspace", "session_id": "s-1", "adapter_url": "http://gw:1/", "time_budget_sec": 60}
AGENT_HOME = "/home/agent"
ECHO = """
printf 'args:'; printf ' [%s]' "$@"; echo
echo "prompt: $(cat)"
echo "dir: $PWD"
env | grep -E '^(ANTHROPIC|CLAUDE_CODE|OPENAI|EXTRA|HOME)' | LC_ALL=C sort
"""


@pytest.fixture
async def local() -> AsyncIterator[RecordingSandbox]:
    async with RecordingSandbox() as sb:
        yield sb


def log(local: RecordingSandbox) -> list[str]:
    return (local.root / "workspace" / ".harness" / "trajectory.jsonl").read_text().splitlines()


async def test_claude_code_is_pointed_to_the_gateway(local, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--max-turns 5 --append-system-prompt 'be brief'")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"EXTRA_ONE": "1", "ANTHROPIC_MODEL": "other"}')
    local.add_command("claude", ECHO)
    assert await ClaudeCodeHarness().run(local, prompt="fix 'it'\nplease", **RUN) == 0
    assert log(local) == [
        "args: [--print] [--verbose] [--output-format] [stream-json] [--dangerously-skip-permissions] "
        "[--max-turns] [5] [--append-system-prompt] [be brief]",
        "prompt: fix 'it'",
        "please",
        f"dir: {local.root}/workspace",
        "ANTHROPIC_AUTH_TOKEN=s-1",
        "ANTHROPIC_BASE_URL=http://gw:1",
        "ANTHROPIC_MODEL=other",
        "ANTHROPIC_SMALL_FAST_MODEL=slime-actor",
        "CLAUDE_CODE_ATTRIBUTION_HEADER=0",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
        "EXTRA_ONE=1",
        f"HOME={local.root}/home/agent",
    ]
    config = json.loads((local.root / "home" / "agent" / ".claude.json").read_text())
    assert config["hasCompletedOnboarding"] is config["bypassPermissionsModeAccepted"] is True
    settings = json.loads((local.root / "home" / "agent" / ".claude" / "settings.json").read_text())
    assert settings == {"permissions": {"defaultMode": "bypassPermissions"}}
    assert (local.root / "workspace" / ".harness" / ".gitignore").read_text() == "*\n"
    [user] = local.root_commands  # nothing is installed: that is done where the sandbox begins
    assert "useradd" in user


async def test_codex_is_pointed_to_the_gateway(local, monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CODEX_EXTRA_ARGS", "--color never")
    local.add_command("codex", ECHO)
    assert await CodexHarness().run(local, prompt="go", **RUN) == 0
    lines = log(local)
    assert lines[0] == (
        "args: [exec] [--json] [--skip-git-repo-check] [--dangerously-bypass-approvals-and-sandbox] "
        "[--color] [never] [-]"
    )
    assert "prompt: go" in lines
    assert {"OPENAI_API_KEY=s-1", "OPENAI_BASE_URL=http://gw:1/v1"} <= set(lines)
    config = tomllib.loads((local.root / "home" / "agent" / ".codex" / "config.toml").read_text())
    assert (config["model"], config["model_provider"]) == ("slime-actor", "slime")
    assert config["model_providers"]["slime"] == {
        "name": "slime", "base_url": "http://gw:1/v1", "wire_api": "responses", "env_key": "OPENAI_API_KEY",
        "requires_openai_auth": False,
    }  # fmt: skip


async def test_an_agent_that_fails_or_takes_too_long(local, caplog):
    local.add_command("claude", "echo broken; exit 9")
    assert await ClaudeCodeHarness().run(local, prompt="p", **RUN) == 9
    assert "sandbox local: the agent ended with 9; its output ends: broken" in caplog.text
    local.add_command("claude", "sleep 1000")
    assert await ClaudeCodeHarness().run(local, prompt="p", **{**RUN, "time_budget_sec": 0}) == -1


async def test_an_agent_that_is_not_installed_is_said(local, caplog):
    assert await run_agent(local, workdir="/workspace", start_cmd="no-such-agent", env={}, time_budget_sec=60) == 127
    assert "the agent ended with 127 (not installed? install_cli comes before run)" in caplog.text


async def test_an_agent_whose_command_line_has_the_prompt(local):
    local.add_command("claude", ECHO)
    env = {"EXTRA_ONE": "1", "HOME": f"{AGENT_HOME}/other"}
    start_cmd = "claude -p 'fix \"it\"'"
    code = await run_agent(local, workdir="/workspace", start_cmd=start_cmd, env=env, time_budget_sec=60)
    assert code == 0
    home = f"HOME={local.root}{AGENT_HOME}/other"
    assert log(local) == ['args: [-p] [fix "it"]', "prompt: ", f"dir: {local.root}/workspace", "EXTRA_ONE=1", home]
    assert not (local.root / "workspace" / ".harness" / "prompt.txt").exists()


class Registry:
    """Root's shell: ``installs`` of npm fail until there have been so many, then the command is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, local: RecordingSandbox, installs: int) -> None:
        self.left, self.pauses = installs, []

        async def run(cmd: str, **options: Any) -> tuple[int, str, str]:
            local.root_commands.append(cmd)
            if "npm install" in cmd:
                self.left -= 1
            node = {"node --version": (127, "", "not found"), "curl": (0, "", ""), "mkdir": (0, "", "")}
            known = next((reply for key, reply in node.items() if cmd.startswith(key)), None)
            return known or ((0, "", "") if self.left <= 0 else (1, "", "no network"))

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        monkeypatch.setattr(local, "exec", run)
        monkeypatch.setattr("slime.agent.harness.common.asyncio.sleep", sleep)


UNPACK = (
    "mkdir -p /opt/node22 && tar -xf /tmp/node.tar -C /opt/node22 --strip-components=1 && "
    "ln -sf /opt/node22/bin/node /opt/node22/bin/npm /opt/node22/bin/npx /usr/local/bin/"
)


@pytest.mark.parametrize(
    ("harness", "command", "package"),
    [(ClaudeCodeHarness, "claude", "@anthropic-ai/claude-code"), (CodexHarness, "codex", "@openai/codex")],
)
async def test_agents_are_installed_where_they_are_missing(tmp_path, monkeypatch, harness, command, package):
    local = RecordingSandbox()
    Registry(monkeypatch, local, installs=1)
    await harness().install_cli(local)
    found, version, download, unpack, install = local.root_commands
    assert (found, version) == (f"{command} --version", "node --version")
    assert download.startswith('curl -fsSL -o /tmp/node.tar "https://nodejs.org/dist/v22.')
    assert unpack == UNPACK
    assert install == f"npm install --global --prefix /usr/local {package} && {command} --version"
    local.root_commands.clear()
    await harness().install_cli(local)
    assert local.root_commands == [f"{command} --version"]


async def test_installs_are_tried_three_times(tmp_path, monkeypatch):
    local = RecordingSandbox()
    registry = Registry(monkeypatch, local, installs=3)
    await install_npm_cli(local, npm_package="tool", check_cmd="tool -v")
    assert [pause for pause in registry.pauses if pause] == [2.0, 2.0]
    registry.left = 4
    with pytest.raises(RuntimeError, match=r"tool could not be installed in sandbox local in 3 attempts.*no network"):
        await install_npm_cli(local, npm_package="tool", check_cmd="tool -v")
    assert registry.left == 1


@pytest.mark.parametrize("by_variables", [False, True])
async def test_installs_without_a_network(tmp_path, monkeypatch, by_variables):
    for name in ("node.tar.xz", "claude.tgz"):
        (tmp_path / name).write_bytes(name.encode())
    node, claude = tmp_path / "node.tar.xz", str(tmp_path / "claude.tgz")
    local = RecordingSandbox()
    Registry(monkeypatch, local, installs=1)
    if by_variables:
        monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(node))
        monkeypatch.setenv("SLIME_AGENT_CC_TARBALL", claude)
        await ClaudeCodeHarness().install_cli(local)
    else:
        await install_npm_cli(local, node_runtime=node, npm_package=claude, check_cmd="claude --version")
    assert local.written == {"/tmp/node.tar": b"node.tar.xz", "/tmp/npm-package.tgz": b"claude.tgz"}
    assert local.root_commands[2:] == [
        UNPACK,
        "npm install --global --prefix /usr/local /tmp/npm-package.tgz && claude --version",
    ]


async def test_a_node_that_is_unpacked_can_be_run(tmp_path, monkeypatch):
    """The command for a real archive, with this test's directory for the root of the file system."""
    for name in ("opt", "tmp", "usr/local/bin", "node-v22-linux-x64/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("node", "npm", "npx"):
        (tmp_path / "node-v22-linux-x64" / "bin" / name).write_text("echo v22")
    subprocess.run(["tar", "-cf", "tmp/node.tar", "node-v22-linux-x64"], cwd=tmp_path, check=True)
    local = RecordingSandbox({"node --version": (127, "", "")})
    await install_node22(local, tmp_path / "tmp" / "node.tar")
    command = re.sub(r"(?<=\s)/(?=opt|tmp|usr)", f"{tmp_path}/", local.root_commands[-1])
    subprocess.run(["sh", "-c", command], check=True)
    for name in ("node", "npm", "npx"):
        said = subprocess.run(["sh", tmp_path / "usr/local/bin" / name], capture_output=True, text=True, check=True)
        assert said.stdout == "v22\n"


@pytest.mark.parametrize("version", ["v22.0.0\n", "v24.1.0"])
async def test_a_newer_node_is_left_alone(tmp_path, version):
    local = RecordingSandbox({"node --version": (0, version, "")})
    await install_node22(local)
    assert local.root_commands == ["node --version"]


@pytest.mark.parametrize("text", ["[1]", "{"])
async def test_extra_variables_must_be_an_object(local, monkeypatch, text):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", text)
    with pytest.raises(ValueError, match="SLIME_AGENT_CC_EXTRA_ENVS must be a JSON object of variables"):
        await ClaudeCodeHarness().run(local, prompt="p", **RUN)


def test_there_is_one_harness_of_each_kind():
    assert ClaudeCodeHarness() is ClaudeCodeHarness()
    assert CodexHarness() is not ClaudeCodeHarness()
    with pytest.raises(TypeError, match="abstract"):
        BaseHarness()
