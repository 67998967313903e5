"""Claude Code and Codex themselves in a sandbox: what the engine wrote for them is one sample, every token once.

npm installs the versions that are named here into ``build/agent-clis``, which takes a gigabyte. Without npm or its
registry the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter, event_stream
from slime.agent.adapters.side_requests import is_agent_turn
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import Limits, LocalSandbox
from slime.utils.types import Sample
from tests.support.agents import END, call_text, gateway, trained_text

ROOT = Path(__file__).resolve().parents[2]
PREFIX = ROOT / "build" / "agent-clis"
LIMITS = Limits(memory_bytes=64 << 30)  # their runtimes reserve more addresses than they use
PACKAGES = {"claude": "@anthropic-ai/claude-code@2.1.332", "codex": "@openai/codex@0.169.0"}


def claude_lines(repo: str) -> list[str]:
    """Its tools complete and clean their inputs before they are sent back: ``Edit``, ``Write`` and ``Bash`` do."""
    edit = {"file_path": f"{repo}/product.py", "old_string": "6 + 7", "new_string": "6 * 7"}
    return [
        "<think>where is it?</think>I look." + call_text("Read", {"file_path": f"{repo}/product.py"}),
        call_text("Edit", edit),
        call_text("Bash", {"command": f"cd {repo} && python3 product.py"}) + call_text("Bash", {"command": "ls"}),
        call_text("Write", {"file_path": f"{repo}/notes.md", "content": "done  \nindeed "}),
        call_text("Write", {"file_path": f"{repo}/other.py", "content": "a = 1  \nb = 2 "}),
        "it is the product",
    ]


def codex_lines(repo: str) -> list[str]:
    return [
        "<think>where is it?</think>I look." + call_text("exec_command", {"cmd": "cat product.py"}),
        call_text("exec_command", {"cmd": "sed -i 's/6 + 7/6 * 7/' product.py  "}),
        call_text("exec_command", {"cmd": "python3 product.py"}) + call_text("exec_command", {"cmd": "ls "}),
        "it is the product",
    ]


@dataclass(frozen=True)
class Cli:
    """A program, the gateway that it needs, and what its model says in a repository."""

    command: str
    adapter: type[BaseAdapter]
    harness: type[BaseHarness]
    lines: Callable[[str], list[str]]


CLIS = [
    Cli("claude", AnthropicAdapter, ClaudeCodeHarness, claude_lines),
    Cli("codex", OpenAIAdapter, CodexHarness, codex_lines),
]


@pytest.fixture(scope="module")
def programs() -> Path:
    """The directory with the commands."""
    bin_directory = PREFIX / "node_modules" / ".bin"
    if not all((bin_directory / command).exists() for command in PACKAGES):
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(PREFIX), *PACKAGES.values()]
        try:
            done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=900)
        except OSError as e:
            pytest.skip(f"no npm: {e}")
        if done.returncode:
            pytest.skip(f"npm cannot install {', '.join(PACKAGES.values())}: {done.stderr[-500:]}")
    return bin_directory


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cli", CLIS, ids=[cli.command for cli in CLIS])
async def test_a_turn_may_take_longer_than_a_program_waits_for_an_event(cli, programs, monkeypatch):
    idle = dict.fromkeys(["CLAUDE_STREAM_IDLE_TIMEOUT_MS", "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS"], "12000")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", json.dumps({**idle, "CLAUDE_ENABLE_STREAM_WATCHDOG": "1"}))
    words = ["stream_idle_timeout_ms=12000", "stream_max_retries=1", "request_max_retries=1"]
    arguments = " ".join(f"-c model_providers.slime.{word}" for word in words)
    monkeypatch.setenv("SLIME_AGENT_CODEX_EXTRA_ARGS", arguments)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 1.0)
    async with LocalSandbox(path=[programs], limits=LIMITS) as box:
        with gateway(cli.adapter, "done", seconds=30.0) as gate:
            options = {"session_id": "s", "adapter_url": gate.url, "time_budget_sec": 600.0}
            assert await cli.harness().run(box, workdir="/workspace/repo", prompt="do it", **options) == 0
            [sample] = await gate.adapter.finish_session("s", base_sample=Sample(index=0, group_index=0))
    assert trained_text(sample) == ["done" + END]
    assert len(gate.script.prompts) == 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cli", CLIS, ids=[cli.command for cli in CLIS])
async def test_a_coding_session_is_one_sample(cli, programs, monkeypatch, capsys):
    statuses: list[tuple[str, int]] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        response = await handler(request)
        statuses.append((request.path, response.status))
        return response

    original = cli.adapter.add_routes

    def with_note(self: BaseAdapter, router: Any) -> None:
        self.app.middlewares.append(note)
        original(self, router)

    monkeypatch.setattr(cli.adapter, "add_routes", with_note)
    async with LocalSandbox(path=[programs], limits=LIMITS) as box:
        version = (await box.exec(f"{cli.command} --version", check=True))[1].strip()
        git = "git -c user.name=a -c user.email=a@b"
        await box.exec(
            "mkdir -p /workspace/repo && cd /workspace/repo && echo 'print(6 + 7)' > product.py && git init -q && "
            f"git add -A && {git} commit -qm begin",
            check=True,
        )
        repo = (await box.exec("cd /workspace/repo && pwd", check=True))[1].strip()
        lines = cli.lines(repo)
        with gateway(cli.adapter, *lines, turn_filter=is_agent_turn) as gate:
            # not "s", which has room for short answers only
            gate.adapter.open_session("coding", sampling_defaults={"max_new_tokens": 4000})
            options = {"session_id": "coding", "adapter_url": gate.url, "time_budget_sec": 600.0}
            code = await cli.harness().run(box, workdir="/workspace/repo", prompt="make it the product", **options)
            log = await box.read_file("/workspace/repo/.harness/trajectory.jsonl")
            assert code == 0, log
            samples = await gate.adapter.finish_session("coding", base_sample=Sample(index=0, group_index=0))
        assert (await box.exec("python3 /workspace/repo/product.py"))[1] == "42\n", log
    assert {status for _, status in statuses} == {200}, statuses
    assert len(gate.script.prompts) == len(lines)
    [sample] = samples
    assert trained_text(sample) == [line + END for line in lines]
    assert sample.agent_session["realign_tokens"] == 0
    assert "42" in gate.script.prompts[3]
    with capsys.disabled():
        print(f"\n{version}: {len(lines)} turns, one sample of {len(sample.tokens)} tokens")
