"""The agents that need no provider's program, in a local sandbox, through a gateway before a scripted engine."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.harness import BaseHarness, MiniAgentHarness, ScriptedHarness
from slime.agent.harness import mini_agent_program as program
from slime.agent.sandbox import LocalSandbox
from slime.utils.types import Sample
from tests.support.agents import END, call_text, gateway, trained_text

pytestmark = pytest.mark.slow

WORKDIR = "/workspace/repo"


@pytest.fixture
async def box() -> AsyncIterator[LocalSandbox]:
    """A sandbox with this interpreter, which may be where only root may look."""
    async with LocalSandbox(path=[Path(sys.executable).parent], uid=0) as sb:
        yield sb


async def run(harness: BaseHarness, box: LocalSandbox, gate: Any, prompt: str = "do it") -> tuple[int, list[Sample]]:
    """Return the exit code and the samples of the session."""
    await harness.install_cli(box)
    code = await harness.run(
        box, workdir=WORKDIR, session_id="s", adapter_url=gate.url, time_budget_sec=100, prompt=prompt
    )
    return code, await gate.adapter.finish_session("s", base_sample=Sample(index=0, group_index=0), reward=1.0)


async def log(box: LocalSandbox) -> list[dict[str, Any]]:
    lines = await box.read_file(f"{WORKDIR}/.harness/trajectory.jsonl")
    return [json.loads(line) for line in lines.splitlines()]


class Asks(ScriptedHarness):
    turns = ("and ü then?", "and last?")
    request = {"temperature": 0.25}  # noqa: RUF012


class FindsTheWord(ScriptedHarness):
    """Its tool is this policy's own; a wrong word ends the session as a failure of the policy would."""

    max_turns = 3
    policy = """
import json, os
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]
def act(reply, messages):
    for call in reply.get("tool_calls") or []:
        with open(json.loads(call["function"]["arguments"])["path"]) as file:
            return [{"role": "tool", "tool_call_id": call["id"], "content": file.read()}]
    with open("answer", "w") as file:
        file.write(f"{reply['content']} in {os.path.basename(os.getcwd())} after {len(messages)} messages")
"""


async def test_turns_of_a_list(box):
    with gateway(OpenAIAdapter, "one", "two", "three") as gate:
        code, [sample] = await run(Asks(), box, gate)
        assert code == 0
        assert trained_text(sample) == [f"{word}{END}" for word in ("one", "two", "three")]
        assert "and ü then?" in gate.script.prompts[1]
        assert [line["content"] for line in await log(box)] == ["one", "two", "three"]
        assert {request["sampling_params"]["temperature"] for request in gate.engine.requests} == {0.25}


async def test_a_policy_with_tools(box):
    await box.exec(f"mkdir -p {WORKDIR}; echo lamp > {WORKDIR}/word", check=True)
    with gateway(OpenAIAdapter, call_text("read_file", {"path": "word"}), "lamp") as gate:
        code, [sample] = await run(FindsTheWord(), box, gate)
    assert code == 0
    assert await box.read_file(f"{WORKDIR}/answer") == "lamp in repo after 4 messages"
    assert len(trained_text(sample)) == 2
    assert "lamp\n" in gate.script.prompts[1]


async def test_scripts_that_fail(box):
    missing = call_text("read_file", {"path": "none"})
    with gateway(OpenAIAdapter, missing) as gate:
        code, _ = await run(FindsTheWord(), box, gate)
        assert code == 1
        assert "No such file" in await box.read_file(f"{WORKDIR}/.harness/trajectory.jsonl")
        code, samples = await run(Asks(), box, gate)  # the session is closed
        assert (code, samples) == (1, [])
        assert "answered 503" in await box.read_file(f"{WORKDIR}/.harness/trajectory.jsonl")
    await box.exec(f"touch {WORKDIR}/none", check=True)
    with gateway(OpenAIAdapter, *[missing] * 3) as gate:
        assert (await run(FindsTheWord(), box, gate))[0] == 3


async def test_the_mini_agent_repairs_a_file(box):
    await box.exec(f"mkdir -p {WORKDIR}; echo 'print(6 + 7)' > {WORKDIR}/product.py", check=True)
    lines = [
        call_text("bash", {"command": "cat product.py; false"}),
        call_text("edit", {"path": "product.py", "old": "6 + 7", "new": "6 * 7"}),
        "done",
    ]
    with gateway(OpenAIAdapter, *lines) as gate:
        code, [sample] = await run(MiniAgentHarness(), box, gate, prompt="make it the product")
        assert code == 0
        assert [text.removesuffix(END) for text in trained_text(sample)] == lines
        assert "print(6 + 7)\n\n[exit code 1]" in gate.script.prompts[1]
        assert "product.py changed" in gate.script.prompts[2]
    assert (await box.exec(f"python3 {WORKDIR}/product.py"))[1] == "42\n"


def test_tools_of_the_mini_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert program.edit("deep/new", "", "a b a") == "deep/new made"
    assert program.edit("deep/new", "", "x") == "deep/new exists; give the text to replace"
    assert program.edit("deep/new", "a", "x") == "the text is in deep/new 2 times, not once"
    assert program.edit("deep/new", "b", "x") == "deep/new changed"
    assert (tmp_path / "deep" / "new").read_text() == "a x a"
    long = program.bash("head -c 30000 /dev/zero | tr '\\0' y")
    assert long == f"{'y' * 5000}\n[20000 characters left out]\n{'y' * 5000}"
    monkeypatch.setattr(program, "COMMAND_S", 0.3)
    assert program.bash("sleep 4329 & sleep 4329") == "not done within 0.3 s, and killed"


async def test_sandboxes_without_python_are_refused(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\necho none; exit 127\n")
    (tmp_path / "python3").chmod(0o755)
    async with LocalSandbox(path=[tmp_path], paths="words", uid=0) as bare:
        with pytest.raises(RuntimeError, match=r"ScriptedHarness needs python3, which sandbox .* does not have"):
            await ScriptedHarness().install_cli(bare)
