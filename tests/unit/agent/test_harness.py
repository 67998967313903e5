"""Harnesses in a directory of this machine: a command in the agent's place really runs, installs are looked at."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from slime.agent import sandbox
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness
from slime.agent.harness.common import install_node22, install_npm_cli
from tests.support.local_sandbox import LocalSandbox

RUN = {"workdir": "/repo", "session_id": "s-1", "adapter_url": "http://gw:1/", "time_budget_sec": 60}
ECHO = """
printf 'args:'; printf ' [%s]' "$@"; echo
echo "prompt: $(cat)"
echo "dir: $PWD"
env | grep -E '^(ANTHROPIC|OPENAI|EXTRA|HOME)' | sort
"""


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalSandbox:
    monkeypatch.setattr(sandbox, "POLL_S", 0.02)
    return LocalSandbox(tmp_path)


def log(local: LocalSandbox) -> list[str]:
    return (local.root / "repo" / ".harness" / "trajectory.jsonl").read_text().splitlines()


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
        f"dir: {local.root}/repo",
        "ANTHROPIC_AUTH_TOKEN=s-1",
        "ANTHROPIC_BASE_URL=http://gw:1",
        "ANTHROPIC_MODEL=other",
        "ANTHROPIC_SMALL_FAST_MODEL=slime-actor",
        "EXTRA_ONE=1",
        f"HOME={local.root}/home",
    ]
    assert json.loads((local.root / "home" / ".claude.json").read_text())["hasCompletedOnboarding"] is True
    assert (local.root / "repo" / ".harness" / ".gitignore").read_text() == "*\n"
    user, found = local.root_commands
    assert "useradd" in user
    assert found == "command -v claude"


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
    assert "OPENAI_API_KEY=s-1" in lines
    config = tomllib.loads((local.root / "home" / ".codex" / "config.toml").read_text())
    assert (config["model"], config["model_provider"]) == ("slime-actor", "slime")
    assert config["model_providers"]["slime"] == {
        "name": "slime", "base_url": "http://gw:1/v1", "wire_api": "chat", "env_key": "OPENAI_API_KEY",
    }  # fmt: skip


async def test_an_agent_that_fails_or_takes_too_long(local, caplog):
    local.add_command("claude", "echo broken; exit 9")
    assert await ClaudeCodeHarness().run(local, prompt="p", **RUN) == 9
    assert "session s-1: the agent ended with 9; its last words: broken" in caplog.text
    local.add_command("claude", "sleep 1000")
    assert await ClaudeCodeHarness().run(local, prompt="p", **{**RUN, "time_budget_sec": 0}) == -1


async def test_agents_are_installed_where_they_are_missing(tmp_path):
    missing = {"command -v": (1, "", ""), "node --version": (127, "", "not found")}
    local = LocalSandbox(tmp_path, missing)
    await ClaudeCodeHarness().install_cli(local)
    found, version, download, unpack, install = local.root_commands
    assert (found, version) == ("command -v claude", "node --version")
    assert download.startswith('curl -fsSL -o /tmp/node.tar.gz "https://nodejs.org/dist/v22.')
    assert unpack == "tar -xzf /tmp/node.tar.gz -C /usr/local --strip-components=1"
    assert install == "npm install --global @anthropic-ai/claude-code"
    local.root_commands.clear()
    await CodexHarness().install_cli(local)
    assert local.root_commands[-1] == "npm install --global @openai/codex"


async def test_installs_without_a_network(tmp_path, monkeypatch):
    for name in ("node.tar.gz", "claude.tgz"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(tmp_path / "node.tar.gz"))
    monkeypatch.setenv("MY_TARBALL", str(tmp_path / "claude.tgz"))
    local = LocalSandbox(tmp_path, {"command -v": (1, "", ""), "node --version": (0, "v18.2.0\n", "")})
    await install_npm_cli(local, binary="claude", package="unused", tarball_env="MY_TARBALL")
    assert local.written == {"/tmp/node.tar.gz": b"node.tar.gz", "/tmp/claude.tgz": b"claude.tgz"}
    assert local.root_commands[2:] == [
        "tar -xzf /tmp/node.tar.gz -C /usr/local --strip-components=1",
        "npm install --global /tmp/claude.tgz",
    ]


@pytest.mark.parametrize("version", ["v22.0.0\n", "v24.1.0"])
async def test_a_newer_node_is_left_alone(tmp_path, version):
    local = LocalSandbox(tmp_path, {"node --version": (0, version, "")})
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
