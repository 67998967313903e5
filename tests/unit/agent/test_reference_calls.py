"""Every public name of the agent package called in the forms of slime <= 0.3.1, and what comes of it.

Each name of the table of public names is called by position as far as that is allowed, and by keyword with everything
that is optional. What was passed is recorded and held against the table, so that no form can be forgotten.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from slime.agent import sglang_parsers
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, common
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.sandbox import E2BSandbox, Sandbox
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample
from tests.support.agents import ToolTokenizer
from tests.support.local_sandbox import RecordingSandbox
from tests.support.public_surface import Name, parse_call, read_table
from tests.unit.agent.test_parsing import NO_PARSERS, TOOLS, xml
from tests.unit.agent.test_sandbox import FakeE2B

ROWS = [row for row in read_table() if row.module.startswith("slime.agent.") and row.state == "here"]
BASE = Sample(index=7, group_index=3, prompt="do it", label="done")
ASK, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TURN = TurnRecord([1, 2], [10, 11], "stop", [-0.1, -0.2])
PARTS = ("reasoning", "text", "tool_uses", "ill_formed")
STOP = {"name": "stop", "input": {}}
CONTEXT = HarnessContext("/workspace", "sid", "http://gw:1")


class Agent(BaseHarness):
    """A harness of a user's own; keeps its steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    async def install_cli(self, sb: Sandbox) -> None:
        self.steps.append(("install", sb.sandbox_id))

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        self.steps.append(("config", ctx))

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        self.steps.append(("launch", ctx, prompt, time_budget_sec))
        return 4


class World:
    """The objects that calls are made on, new for each call."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.e2b = FakeE2B(monkeypatch)
        self.local = RecordingSandbox()
        self.manager = TrajectoryManager()
        self.adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://router:1")
        self.adapter.open_session("s")
        for manager in (self.manager, self.adapter.manager):
            manager.record_turn("s", turn=TURN, prompt_messages=[ASK], response_message=REPLY)
        self.agent = Agent()
        self.agent.steps.clear()
        self.posts: list[tuple[Any, ...]] = []
        self.stopped: list[Any] = []
        monkeypatch.setattr(common, "post", self.post)
        monkeypatch.setattr(sglang_parsers, "tool_calls", lambda body, tools, name: ("rest", [("stop", "{}")], True))

    async def post(self, url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        self.posts.append((url, list(payload["input_ids"]), payload["sampling_params"]["max_new_tokens"], headers))
        finish = {"finish_reason": {"type": "stop"}, "completion_tokens": 1}
        return {"meta_info": {**finish, "output_token_logprobs": [[-0.5, 9, None]]}}

    def serve(self) -> Any:
        """An application that runs; ended with the test."""
        self.stopped.append(run_app_in_thread(web.Application(), host="127.0.0.1"))
        return self.stopped[-1]

    def receiver(self, name: str) -> Any:
        """Return the object that the methods of class ``name`` are called on."""
        if name == "AppHandle":
            return self.serve()
        if name == "E2BSandbox":
            box = E2BSandbox("img")
            box._sandbox = sys.modules["e2b"].AsyncSandbox()
            return box
        return {"TrajectoryManager": self.manager, "BaseAdapter": self.adapter, "BaseHarness": self.agent}[name]


@dataclass
class Recorder:
    """A callable that keeps what it is called with."""

    target: Callable[..., Any]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.target(*args, **kwargs)


Call = Callable[[Any, World], Any]
Expected = Any
"""The result, or a function of the result and the world that asserts, or returns whether it is right."""


def is_turn(turn: Any, w: World) -> bool:
    return [turn.prompt_ids, turn.output_ids, turn.finish_reason, turn.output_log_probs, turn.ill_formed] == [
        [1, 2], [3], "length", [-0.5], True,
    ]  # fmt: skip


def recorded(result: None, w: World) -> bool:
    return w.manager.turn_count("n") == 1


def cut_samples(samples: list[Sample], w: World) -> None:
    [sample] = samples
    assert (sample.tokens, sample.reward, sample.rollout_id, sample.label) == ([1, 2, 10], 0.5, 7, "done")
    assert sample.metadata == {"task": 1, "truncated": True, "use_tool": False, "ill_formed": False}
    assert w.manager.get_trajectory("s", base_sample=BASE) == []


def finished(samples: list[Sample], w: World) -> None:
    [sample] = samples
    assert (sample.tokens, sample.reward, sample.response) == ([1, 2, 10, 11], 0.5, "\n\x0b")
    assert sample.metadata == {"task": 1, "truncated": False, "use_tool": False, "ill_formed": False}
    assert "s" in w.adapter.closed


def is_adapter(cls: type, turns: int | None) -> Callable[[Any, World], None]:
    def check(adapter: Any, w: World) -> None:
        assert type(adapter) is cls
        assert isinstance(adapter.app, web.Application)
        assert (adapter.store, adapter.closed, adapter.inflight.count("s")) == ({}, {}, 0)
        assert (adapter.max_turns_per_sid, adapter.manager.fork_threshold_tokens) == (turns, 9 if turns else 1024)

    return check


def opened(result: None, w: World) -> None:
    assert w.adapter.store["n"] == common.Session({"temperature": 0.5}, 99)
    with pytest.raises(ValueError, match="is open already"):
        w.adapter.open_session("n")


def dropped(result: None, w: World) -> bool:
    return "s" in w.adapter.closed and not w.adapter.manager.has_session("s")


def generated(turn: TurnRecord, w: World) -> None:
    made = (turn.prompt_ids, turn.output_ids, turn.output_log_probs, turn.finish_reason)
    assert made == ([1, 2], [9], [-0.5], "stop")
    assert w.posts == [("http://router:1/generate", [1, 2], 5, {"X-SMG-Routing-Key": "s"})]


def parsed(result: Any, w: World) -> bool:
    return [getattr(result, part) for part in PARTS] == ["hm", "see", [STOP], False]


def spawned(result: tuple[int, str], w: World) -> None:
    assert result == (3, f"blue {w.local.root}/workspace\n")
    assert (w.local.root / "workspace" / "log").read_text() == result[1]


def is_box(box: Any, w: World) -> None:
    assert [box.image, box.timeout, box.image_metadata_key, box.rpc_retries, box.size] == ["img", 60, "key", 2, "xl"]


def logged(code: int, w: World) -> None:
    assert code == 0
    assert (
        w.local.root / "workspace" / ".harness" / "trajectory.jsonl"
    ).read_text() == f"said 1 {w.local.root}/workspace\n"


def installed(result: None, w: World) -> None:
    assert w.local.written == {"/tmp/node.tar": b"node", "/tmp/npm-package.tgz": b"tool"}
    assert [cmd.split()[0] for cmd in w.local.root_commands] == ["tool", "node", "mkdir", "npm"]


def node_installed(result: None, w: World) -> None:
    assert w.local.written == {"/tmp/node.tar": b"node"}
    assert [cmd.split()[0] for cmd in w.local.root_commands] == ["node", "mkdir"]


def ran(code: int, w: World) -> None:
    assert code == 4
    assert w.agent.steps == [("config", CONTEXT), ("launch", CONTEXT, "fix", 60)]
    assert "useradd" in w.local.root_commands[0]


def serves(handle: Any, w: World) -> None:
    w.stopped.append(handle)
    assert (handle.host, handle.thread.name) == ("127.0.0.1", "gw")
    assert requests.get(f"http://127.0.0.1:{handle.port}/healthz", timeout=20).json() == {"ok": True}


def tarball(w: World, name: str) -> str:
    """A file of this machine; Node and the tool are missing in the sandbox until npm has run."""
    w.local.answers = {"npm install": (0, "", ""), "tool -v": (1, "", ""), "node --version": (1, "", "")}
    (w.root / f"{name}.tgz").write_bytes(name.encode())
    return str(w.root / f"{name}.tgz")


def all_options(w: World, turns: int | None = 4) -> dict[str, Any]:
    return {
        "tokenizer": ToolTokenizer(), "sglang_url": "http://e:1", "tool_parser": None, "reasoning_parser": None,
        "max_turns_per_sid": turns, "fork_threshold_tokens": 9, "debug_callback": print,
    }  # fmt: skip


BEARER = make_mocked_request("POST", "/", headers={"Authorization": "Bearer sid"})
USE_BODY = "<think>\nhm\n</think>see " + xml("stop")
SYSTEM_BODY = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
CHAT = [{"role": "system", "content": "be\nbrief"}, ASK, REPLY]
FOLDED = {"messages": [{"role": "user", "content": "q\n<system-reminder>\nx\n</system-reminder>\n"}]}
WIRE_TOOL = {"name": "stop", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "stop", "description": "", "parameters": {"type": "object"}},
}
RUN_WORDS = {"workdir": "/workspace", "start_cmd": "echo said $N $PWD", "env": {"N": "1"}, "time_budget_sec": 60}
WAIT_WORDS: dict[str, Any] = {
    "cmd": "echo $COLOR $PWD; exit 3", "time_budget_sec": 60, "tag": "t", "user": "agent", "env": {"COLOR": "blue"},
    "workdir": "/workspace", "out_file": "/workspace/log", "want_output": True,
}  # fmt: skip
BOX_WORDS = {"timeout": 60, "image_metadata_key": "key", "rpc_retries": 2, "size": "xl"}
EXEC_WORDS: dict[str, Any] = {"user": "agent", "env": {"A": "b"}, "timeout": 5, "check": True, "idempotent": False}
HARNESS_WORDS = {"workdir": "/workspace", "session_id": "sid", "adapter_url": "http://gw:1/", "time_budget_sec": 60}
FINISH_WORDS: dict[str, Any] = {"base_sample": BASE, "reward": 0.5, "extra_metadata": {"task": 1}}
TURN_WORDS: dict[str, Any] = {"turn": TURN, "prompt_messages": [ASK], "response_message": REPLY, "metadata": {"k": 1}}
SERVE_WORDS: dict[str, Any] = {
    "host": "127.0.0.1", "port": 0, "thread_name": "gw", "start_timeout_sec": 30.0, "runner_kwargs": {},
}  # fmt: skip


def fold(f: Any, w: World, **words: Any) -> Any:
    body = {"messages": [dict(ASK), {"role": "system", "content": "x"}]}
    changed = f(body=body) if words else f(body)
    return changed, body


def handle_of(f: Any, w: World, by_keyword: bool) -> Any:
    parts = ("h", 1, threading.current_thread(), asyncio.get_running_loop(), "runner")
    made = f(**dict(zip(("host", "port", "thread", "loop", "runner"), parts, strict=True))) if by_keyword else f(*parts)
    return made.host, made.port, made.thread, made.loop, made.runner


def log_lines(f: Any, w: World) -> list[tuple[str, int]]:
    """Return the log lines of a quick 200, a slow one, a HEAD and an error."""
    lines: list[tuple[str, int]] = []
    logger = SimpleNamespace(info=lambda words, remote, method, path, status, time: lines.append((method, status)))
    access = f(logger, "%a")
    for method, status, seconds in [("POST", 200, 1.0), ("POST", 200, 121.0), ("HEAD", 404, 1.0), ("POST", 500, 1.0)]:
        access.log(make_mocked_request(method, "/"), web.Response(status=status), seconds)
    return lines


A = "slime.agent."
CALLS: dict[str, list[tuple[Call, Expected]]] = {
    f"{A}trajectory.TurnRecord": (
        turn_record := [
            (lambda f, w: f([1, 2], [3], "length", [-0.5], True), is_turn),
            (
                lambda f, w: f(
                    prompt_ids=[1, 2], output_ids=[3], finish_reason="length", output_log_probs=[-0.5], ill_formed=True
                ),
                is_turn,
            ),
            (lambda f, w: f([1], [], "stop"), lambda r, w: (list(r.output_log_probs), r.ill_formed) == ([], False)),
        ]
    ),
    f"{A}adapters.common.TurnRecord": turn_record,
    f"{A}trajectory.TrajectoryManager": [
        (lambda f, w: f(), lambda r, w: r.fork_threshold_tokens == 1024),
        (lambda f, w: f(fork_threshold_tokens=None), lambda r, w: r.fork_threshold_tokens == 1024),
        (lambda f, w: f(fork_threshold_tokens=0), lambda r, w: r.fork_threshold_tokens == 0),
    ],
    f"{A}trajectory.TrajectoryManager.has_session": [
        (lambda f, w: f("s"), True),
        (lambda f, w: f(sid="n"), False),
    ],
    f"{A}trajectory.TrajectoryManager.turn_count": [(lambda f, w: f("s"), 1), (lambda f, w: f(sid="n"), 0)],
    f"{A}trajectory.TrajectoryManager.record_turn": [
        (lambda f, w: f("n", **TURN_WORDS), recorded),
        (lambda f, w: f(sid="n", **TURN_WORDS), recorded),
    ],
    f"{A}trajectory.TrajectoryManager.get_trajectory": [
        (lambda f, w: f("s", **FINISH_WORDS, max_sample_tokens=3), cut_samples),
        (lambda f, w: f(sid="s", **FINISH_WORDS, max_sample_tokens=3), cut_samples),
    ],
    f"{A}trajectory.TrajectoryManager.drop_session": [
        (lambda f, w: f("s"), lambda r, w: not w.manager.has_session("s")),
        (lambda f, w: f(sid="s"), lambda r, w: not w.manager.has_session("s")),
    ],
    f"{A}trajectory._common_prefix_len": [
        (lambda f, w: f([1, 2, 3], [1, 2, 4], 2), 2),
        (lambda f, w: f(a=[1, 2, 3], b=[1, 2], chunk=1), 2),
    ],
    f"{A}adapters.AnthropicAdapter": [
        (lambda f, w: f(**all_options(w)), is_adapter(AnthropicAdapter, 4)),
        (lambda f, w: f(tokenizer=ToolTokenizer(), sglang_url="http://e:1"), is_adapter(AnthropicAdapter, None)),
    ],
    f"{A}adapters.OpenAIAdapter": [
        (lambda f, w: f(**all_options(w)), is_adapter(OpenAIAdapter, 4)),
        (lambda f, w: f(tokenizer=ToolTokenizer(), sglang_url="http://e:1"), is_adapter(OpenAIAdapter, None)),
    ],
    f"{A}adapters.BaseAdapter": [(lambda f, w: issubclass(OpenAIAdapter, f) and inspect.isabstract(f), True)],
    f"{A}adapters.BaseAdapter.open_session": [
        (lambda f, w: f("n", sampling_defaults={"temperature": 0.5}, max_context_tokens=99), opened),
        (lambda f, w: f(sid="n", sampling_defaults={"temperature": 0.5}, max_context_tokens=99), opened),
    ],
    f"{A}adapters.BaseAdapter.finish_session": [
        (lambda f, w: f("s", **FINISH_WORDS, wait_timeout=0.1), finished),
        (lambda f, w: f(sid="s", **FINISH_WORDS, wait_timeout=0.1), finished),
    ],
    f"{A}adapters.BaseAdapter.drop_session": [
        (lambda f, w: f("s", wait_timeout=0.1), dropped),
        (lambda f, w: f(sid="s", wait_timeout=0.1), dropped),
    ],
    f"{A}adapters.BaseAdapter.shutdown_session": [
        (lambda f, w: f("s", wait_timeout=0.1), lambda r, w: "s" in w.adapter.closed),
        (lambda f, w: f(sid="s", wait_timeout=0.1), lambda r, w: w.adapter.manager.has_session("s")),
    ],
    f"{A}adapters.common.call_sglang_generate": [
        (
            lambda f, w: f([1, 2], common.Session(), {"max_tokens": 5}, adapter=w.adapter, session_id="s"),
            generated,
        ),
        (
            lambda f, w: f(
                prompt_ids=[1, 2], session=common.Session(), body={"max_tokens": 5}, adapter=w.adapter, session_id="s"
            ),
            generated,
        ),
        (
            lambda f, w: f([1, 2], common.Session(max_context_tokens=2), {}, adapter=w.adapter),
            lambda r, w: (r.output_ids, r.finish_reason, w.posts) == ([], "length", []),
        ),
    ],
    f"{A}adapters.common.flatten_content": [
        (lambda f, w: f([{"type": "text", "text": "a"}, "b"]), "a\nb"),
        (lambda f, w: f(content="a"), "a"),
        (lambda f, w: f(None), ""),
    ],
    f"{A}adapters.common.tool_call_dict": [
        (lambda f, w: f("n", {"a": 1}), {"type": "function", "function": {"name": "n", "arguments": {"a": 1}}}),
        (lambda f, w: f(name="n", arguments={}), {"type": "function", "function": {"name": "n", "arguments": {}}}),
    ],
    f"{A}adapters.common.manager_finish_reason": [
        (lambda f, w: f("stop", [STOP]), "tool_calls"),
        (lambda f, w: f("length", []), "length"),
        (lambda f, w: f(finish_reason="abort", tool_uses=[]), "stop"),
    ],
    f"{A}adapters.common.sid_from_bearer": [
        (lambda f, w: f(BEARER), "sid"),
        (lambda f, w: f(request=make_mocked_request("POST", "/")), None),
    ],
    f"{A}adapters.common.sid_from_body": [
        (lambda f, w: f({"metadata": {"session_id": "m"}, "user": "u"}), "m"),
        (lambda f, w: f(body={"user": "u"}), "u"),
    ],
    f"{A}adapters.common.Session": [
        (lambda f, w: (f({"top_p": 1}, 9).sampling_defaults, f().max_context_tokens), ({"top_p": 1}, 0)),
        (lambda f, w: f(sampling_defaults={}, max_context_tokens=9).max_context_tokens, 9),
    ],
    f"{A}adapters.common.Reply": [
        (lambda f, w: f("r", "t", [], "stop", 1, 2).output_tokens, 2),
        (
            lambda f, w: f(
                reasoning="r", text="t", tool_uses=[], finish_reason="stop", prompt_tokens=1, output_tokens=2
            ),
            lambda r, w: (r.reasoning, r.text, r.finish_reason, r.prompt_tokens) == ("r", "t", "stop", 1),
        ),
    ],
    f"{A}adapters.anthropic._request_session_id": [
        (lambda f, w: f(BEARER), "sid"),
        (lambda f, w: f(request=make_mocked_request("POST", "/", headers={"X-Api-Key": "key"})), "key"),
    ],
    f"{A}adapters.anthropic._translate_messages": [
        (lambda f, w: f([ASK, REPLY], SYSTEM_BODY), CHAT),
        (lambda f, w: f(messages=[ASK, REPLY], system="be\nbrief"), CHAT),
        (lambda f, w: f([ASK], None), [ASK]),
    ],
    f"{A}adapters.anthropic._tools_to_chat_tools": [
        (lambda f, w: f([WIRE_TOOL]), [CHAT_TOOL]),
        (lambda f, w: f(tools=[WIRE_TOOL]), [CHAT_TOOL]),
    ],
    f"{A}adapters.anthropic._fold_mid_list_system_into_user": [
        (lambda f, w: fold(f, w), (True, FOLDED)),
        (lambda f, w: fold(f, w, by_keyword=True), (True, FOLDED)),
        (lambda f, w: f({"messages": [ASK]}), False),
    ],
    f"{A}adapters.openai._request_session_id": [
        (lambda f, w: f(BEARER, {"user": "u"}), "sid"),
        (lambda f, w: f(request=make_mocked_request("POST", "/"), body={"user": "u"}), "u"),
    ],
    f"{A}adapters.openai._translate_messages": [
        (lambda f, w: f([{"role": "developer", "content": "be\nbrief"}, ASK, REPLY]), CHAT),
        (lambda f, w: f(messages=[{"role": "system", "content": SYSTEM_BODY}, ASK, REPLY]), CHAT),
    ],
    f"{A}parsing.parse_model_output": [
        (lambda f, w: f(USE_BODY, tools_schema=TOOLS, **NO_PARSERS), parsed),
        (lambda f, w: f(raw_output=USE_BODY, tools_schema=TOOLS, **NO_PARSERS), parsed),
    ],
    f"{A}parsing.parse_tool_uses": [
        (lambda f, w: f("body", TOOLS, "qwen25"), ("rest", [STOP], False)),
        (lambda f, w: f(body="body", tools_schema=TOOLS, parser_name="qwen25"), ("rest", [STOP], False)),
    ],
    f"{A}parsing.parse_xml_tool_uses": [
        (lambda f, w: f("see " + xml("stop"), TOOLS), ("see", [STOP])),
        (lambda f, w: f(body=xml("unknown"), tools_schema=TOOLS), (xml("unknown"), [])),
    ],
    f"{A}parsing.ParsedModelOutput": [
        (lambda f, w: f("hm", "see", [STOP], False), parsed),
        (lambda f, w: f(reasoning="hm", text="see", tool_uses=[STOP], ill_formed=False), parsed),
    ],
    f"{A}sandbox.Sandbox": [(lambda f, w: (isinstance(w.local, f), isinstance(3, f)), (True, False))],
    f"{A}sandbox.exec_and_wait": [
        (lambda f, w: f(w.local, **WAIT_WORDS), spawned),
        (lambda f, w: f(sb=w.local, **WAIT_WORDS), spawned),
        (lambda f, w: f(w.local, cmd="true", time_budget_sec=60, tag="t", user="agent"), (0, "")),
    ],
    f"{A}sandbox.E2BSandbox": [
        (lambda f, w: f("img", **BOX_WORDS), is_box),
        (lambda f, w: f(image="img", **BOX_WORDS), is_box),
    ],
    f"{A}sandbox.E2BSandbox.exec": [
        (lambda f, w: f("ls", **EXEC_WORDS), (0, "hello", "")),
        (
            lambda f, w: f(cmd="ls", **EXEC_WORDS),
            lambda r, w: w.e2b.calls == [("run", "ls", {"user": "agent", "envs": {"A": "b"}, "timeout": 5})],
        ),
    ],
    f"{A}sandbox.E2BSandbox.write_file": [
        (lambda f, w: f("/a", "text", user="agent"), lambda r, w: w.e2b.calls == [("write", "/a", "text", "agent")]),
        (
            lambda f, w: f(sandbox_path="/a", content=b"b", user="root"),
            lambda r, w: w.e2b.calls == [("write", "/a", b"b", "root")],
        ),
    ],
    f"{A}sandbox.E2BSandbox.read_file": [
        (lambda f, w: f("/a", user="agent"), "text"),
        (lambda f, w: f(sandbox_path="/a", user="agent"), lambda r, w: w.e2b.calls == [("read", "/a", "agent")]),
    ],
    f"{A}sandbox.ensure_agent_user": [
        (lambda f, w: f(w.local, "/workspace"), lambda r, w: "chown -R agent: /workspace" in w.local.root_commands[0]),
        (lambda f, w: f(sb=w.local, workdir="/x"), lambda r, w: "chown -R agent: /x" in w.local.root_commands[0]),
    ],
    f"{A}sandbox.EXIT_TIME_BUDGET_EXCEEDED": [(lambda f, w: f, -1)],
    f"{A}harness.BaseHarness": [(lambda f, w: inspect.isabstract(f) and Agent() is Agent(), True)],
    f"{A}harness.BaseHarness.run": [
        (lambda f, w: f(w.local, **HARNESS_WORDS, prompt="fix"), ran),
        (lambda f, w: f(sb=w.local, **HARNESS_WORDS, prompt="fix"), ran),
    ],
    f"{A}harness.BaseHarness.install_cli": [
        (lambda f, w: f(w.local), lambda r, w: w.agent.steps == [("install", "local")]),
        (lambda f, w: f(sb=w.local), lambda r, w: w.agent.steps == [("install", "local")]),
    ],
    f"{A}harness.BaseHarness.write_config": [
        (lambda f, w: f(w.local, CONTEXT), lambda r, w: w.agent.steps == [("config", CONTEXT)]),
        (lambda f, w: f(sb=w.local, ctx=CONTEXT), lambda r, w: w.agent.steps == [("config", CONTEXT)]),
    ],
    f"{A}harness.BaseHarness.launch_and_wait": [
        (lambda f, w: f(w.local, CONTEXT, "fix", 60), 4),
        (lambda f, w: f(sb=w.local, ctx=CONTEXT, prompt="fix", time_budget_sec=60), 4),
    ],
    f"{A}harness.HarnessContext": [
        (lambda f, w: f("/workspace", "sid", "http://gw:1", "slime-actor"), CONTEXT),
        (
            lambda f, w: f(
                workdir="/workspace", session_id="sid", adapter_url="http://gw:1", model_label="slime-actor"
            ),
            CONTEXT,
        ),
        (lambda f, w: f("/workspace", "sid", "http://gw:1"), CONTEXT),
    ],
    f"{A}harness.ClaudeCodeHarness": [(lambda f, w: f() is f() and isinstance(f(), BaseHarness), True)],
    f"{A}harness.CodexHarness": [(lambda f, w: f() is f() and isinstance(f(), BaseHarness), True)],
    f"{A}harness.common.run_agent": [
        (lambda f, w: f(w.local, **RUN_WORDS), logged),
        (lambda f, w: f(sb=w.local, **RUN_WORDS), logged),
    ],
    f"{A}harness.common.install_npm_cli": [
        (
            lambda f, w: f(
                w.local, node_runtime=tarball(w, "node"), npm_package=tarball(w, "tool"), check_cmd="tool -v"
            ),
            installed,
        ),
        (
            lambda f, w: f(
                sb=w.local, node_runtime=tarball(w, "node"), npm_package=tarball(w, "tool"), check_cmd="tool -v"
            ),
            installed,
        ),
    ],
    f"{A}harness.common.install_node22": [
        (lambda f, w: f(w.local, tarball(w, "node")), node_installed),
        (lambda f, w: f(sb=w.local, tarball=tarball(w, "node")), node_installed),
    ],
    f"{A}aiohttp_threaded.run_app_in_thread": [
        (lambda f, w: f(w.adapter.app, **SERVE_WORDS), serves),
        (lambda f, w: f(app=w.adapter.app, **SERVE_WORDS), serves),
    ],
    f"{A}aiohttp_threaded.AppHandle": [
        (lambda f, w: handle_of(f, w, False), lambda r, w: (r[0], r[1], r[4]) == ("h", 1, "runner")),
        (lambda f, w: handle_of(f, w, True), lambda r, w: r[2] is threading.current_thread()),
    ],
    f"{A}aiohttp_threaded.AppHandle.stop": [
        (lambda f, w: f(), lambda r, w: not w.stopped[-1].thread.is_alive()),
    ],
    f"{A}aiohttp_threaded.FilteredAccessLogger": [(log_lines, [("POST", 200), ("POST", 500)])],
}


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], World]]:
    made: list[World] = []

    def make() -> World:
        root = tmp_path / str(len(made))
        root.mkdir()
        made.append(World(root, monkeypatch))
        return made[-1]

    yield make
    for world in made:
        for handle in world.stopped:
            handle.stop()


def test_every_public_name_is_called():
    assert set(CALLS) == {row.path for row in ROWS}
    assert len(CALLS) > 50


@pytest.mark.parametrize("row", [pytest.param(row, id=row.path.removeprefix(A)) for row in ROWS])
async def test_calls_as_of_older_releases(row: Name, worlds: Callable[[], World], caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL, logger="slime.agent")
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for call, expected in CALLS[row.path]:
        world = worlds()
        target = row.load() if row.kind != "method" else getattr(world.receiver(row.name.partition(".")[0]), row.leaf)
        recorder = Recorder(target) if row.kind != "value" else target
        async with world.local:
            result = call(recorder, world)
            result = await result if inspect.isawaitable(result) else result
            if callable(expected):
                assert expected(result, world) is not False
            else:
                assert result == expected
        made += recorder.calls if row.kind != "value" else []
    if row.kind != "value":
        check_forms(row, made)


def check_forms(row: Name, made: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Some call passes all that may be passed by position, and one all by keyword."""
    assert made, "never called"
    parameters = parse_call(row.call).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert max(len(args) for args, _ in made) == len(by_position)
    assert {p.name for p in parameters} in [set(words) for args, words in made if not args]
