"""Long commands, really run in a directory; E2B's sandboxes against a stand-in for its package."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent import e2b_sandbox, local_sandbox, sandbox
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    E2BSandbox,
    Sandbox,
    ensure_agent_user,
    exec_and_wait,
)
from tests.support.local_sandbox import RecordingSandbox


@pytest.fixture
async def local() -> AsyncIterator[RecordingSandbox]:
    async with RecordingSandbox() as sb:
        yield sb


async def wait_for(local: RecordingSandbox, cmd: str, **options: Any) -> tuple[int, str]:
    return await exec_and_wait(
        local, cmd=cmd, **{"time_budget_sec": 60, "tag": "t1", "user": "agent", **options}
    )  # fmt: skip


def is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")  # killed, and not reaped yet


async def test_a_command_that_succeeds(local):
    options = {"env": {"COLOUR": "blue"}, "workdir": "/workspace"}
    assert await wait_for(local, "echo $COLOUR; pwd", **options) == (0, "")
    assert await wait_for(local, "echo $COLOUR; pwd", want_output=True, **options) == (
        0,
        f"blue\n{local.root}/workspace\n",
    )


async def test_a_command_that_fails_tells_its_last_words(local):
    code, tail = await wait_for(local, "seq 1 1000; echo lost >&2; exit 7")
    assert code == 7
    assert len(tail) == 512
    assert tail.endswith("999\n1000\nlost\n")


async def test_the_output_goes_where_it_is_wanted(local):
    assert await wait_for(local, "echo here", out_file="/workspace/log") == (0, "")
    assert (local.root / "workspace" / "log").read_text() == "here\n"


async def test_a_missing_work_directory_is_a_failure(local):
    code, tail = await wait_for(local, "echo never", workdir="/workspace/none")
    assert code == 1
    assert "No such file or directory" in tail


async def test_a_command_that_takes_too_long_is_killed_with_what_it_started(local, monkeypatch):
    pid_file = local.root / "workspace" / "pid"
    clock = SimpleNamespace(monotonic=lambda: 100.0 if pid_file.exists() else 0.0)
    monkeypatch.setattr(sandbox, "time", clock)
    cmd = "echo waiting; sleep 1000 & echo $! > /workspace/new; mv /workspace/new /workspace/pid; wait"
    assert await wait_for(local, cmd, time_budget_sec=60) == (EXIT_TIME_BUDGET_EXCEEDED, "waiting\n")
    assert EXIT_TIME_BUDGET_EXCEEDED == -1
    async with asyncio.timeout(60):
        while is_alive(pid_file.read_text().strip()):
            await asyncio.sleep(0.01)


async def test_a_command_that_has_hardly_begun_is_killed_too(local):
    assert await wait_for(local, "sleep 1000", time_budget_sec=0) == (EXIT_TIME_BUDGET_EXCEEDED, "")


async def test_a_long_command_is_asked_for_less_and_less_often(monkeypatch):
    now, waits = [0.0], []

    async def sleep(seconds: float) -> None:
        waits.append(round(seconds, 3))
        now[0] += seconds

    async def nothing(*what: Any, **options: Any) -> tuple[int, str, str]:
        return 0, "", ""

    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sandbox, "asyncio", SimpleNamespace(sleep=sleep))
    assert await wait_for(SimpleNamespace(exec=nothing, write_file=nothing), "make", time_budget_sec=20) == (-1, "")
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 3.7]


async def test_a_spawn_that_is_repeated_runs_once(local, monkeypatch):
    real = local.exec

    async def twice(cmd: str, **options: Any) -> tuple[int, str, str]:
        if "setsid" in cmd:
            await real(cmd, **options)
        return await real(cmd, **options)

    monkeypatch.setattr(local, "exec", twice)
    assert await wait_for(local, "echo run >> /workspace/runs") == (0, "")
    assert (local.root / "workspace" / "runs").read_text() == "run\n"


async def test_a_tag_can_be_used_again(local):
    assert (await wait_for(local, "exit 3"))[0] == 3
    assert (await wait_for(local, "exit 4"))[0] == 4


async def test_tags_name_files(local):
    with pytest.raises(ValueError, match=r"tag 'a/b' names files"):
        await wait_for(local, "true", tag="a/b")


async def test_the_user_of_agents(local):
    await ensure_agent_user(local, "/workspace/it's here")
    [cmd] = local.root_commands
    assert "useradd --create-home --shell /bin/bash agent" in cmd
    assert "chown -R agent: '/workspace/it'\"'\"'s here'" in cmd


async def test_git_trusts_repositories_of_others_for_the_agent(local, monkeypatch):
    """The command really run, but for what needs root; a second time nothing changes."""
    await ensure_agent_user(local, str(local.root / "workspace"))
    [cmd] = local.root_commands
    config = local.root / "gitconfig"
    config.write_text("[safe]\n\tdirectory = /srv\n")
    environment = {**os.environ, "GIT_CONFIG_SYSTEM": str(config)}
    for _ in range(2):
        subprocess.run(["sh", "-c", "id() { :; }; chown() { :; }; " + cmd], env=environment, check=True)
        said = ["git", "config", "--system", "--get-all", "safe.directory"]
        found = subprocess.run(said, env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.splitlines() == ["/srv", "*"]


async def test_images_without_git_are_served_too(local):
    await ensure_agent_user(local, str(local.root / "workspace"))
    [cmd] = local.root_commands
    without = 'id() { :; }; chown() { :; }; git() { echo "git was called"; exit 9; }; command() { return 1; }; '
    done = subprocess.run(["sh", "-c", without + cmd], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_sandboxes_are_recognized(local):
    assert isinstance(local, Sandbox)
    assert isinstance(E2BSandbox("image"), Sandbox)
    assert E2BSandbox("image").sandbox_id == ""
    assert not isinstance(object(), Sandbox)


class CommandExitException(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("exited")
        self.exit_code, self.stdout, self.stderr = code, "out", "err"


class RateLimitException(Exception):
    pass


class TimeoutException(Exception):
    pass


class FakeE2B:
    """``AsyncSandbox`` of the package: replies and errors in turn, calls kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: list[Exception] = []
        fake = self

        class AsyncSandbox:
            sandbox_id = "sb-1"

            @staticmethod
            async def create(**options: Any) -> Any:
                fake.note("create", options)
                return AsyncSandbox()

            def __init__(self) -> None:
                self.commands = SimpleNamespace(run=self.run)
                self.files = SimpleNamespace(write=self.write, read=self.read)

            async def run(self, cmd: str, **options: Any) -> Any:
                fake.note("run", cmd, options)
                return SimpleNamespace(exit_code=0, stdout="hello", stderr="")

            async def write(self, path: str, data: Any, user: str) -> None:
                fake.note("write", path, data, user)

            async def read(self, path: str, user: str) -> str:
                fake.note("read", path, user)
                return "text"

            async def kill(self) -> None:
                fake.note("kill")

        module = ModuleType("e2b")
        module.AsyncSandbox = AsyncSandbox
        monkeypatch.setitem(sys.modules, "e2b", module)
        monkeypatch.setattr(e2b_sandbox, "BACKOFF_BASE_S", 0.0)

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> FakeE2B:
    return FakeE2B(monkeypatch)


async def test_e2b_is_called_as_its_package_wants(e2b, tmp_path):
    (tmp_path / "file").write_bytes(b"\0data")
    async with E2BSandbox("python:3.11", timeout=60) as sb:
        assert sb.sandbox_id == "sb-1"
        assert await sb.exec("ls", user="agent", env={"A": "b"}, timeout=5) == (0, "hello", "")
        await sb.write_file("/a", "text")
        await sb.write_file(sandbox_path="/b", content=tmp_path / "file", user="agent")
        assert await sb.read_file(sandbox_path="/a") == "text"
    assert e2b.calls == [
        ("create", {"template": "python:3.11", "timeout": 60}),
        ("run", "ls", {"user": "agent", "envs": {"A": "b"}, "timeout": 5}),
        ("write", "/a", "text", "root"),
        ("write", "/b", b"\0data", "agent"),
        ("read", "/a", "root"),
        ("kill",),
    ]


async def test_services_that_take_the_image_in_the_metadata(e2b, monkeypatch):
    async with E2BSandbox("img", image_metadata_key="image", size="xl"):
        pass
    monkeypatch.setenv("SWE_SANDBOX_IMAGE_METADATA_KEY", "old")
    async with E2BSandbox("img"):
        pass
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "new")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "7")
    monkeypatch.setenv("SLIME_AGENT_E2B_SANDBOX_SIZE", "sm")
    async with E2BSandbox("img"):
        pass
    assert [call[1] for call in e2b.calls if call[0] == "create"] == [
        {"template": "xl", "metadata": {"image": "img"}, "timeout": 3600},
        {"template": "md", "metadata": {"old": "img"}, "timeout": 3600},
        {"template": "sm", "metadata": {"new": "img"}, "timeout": 7},
    ]
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "many")
    with pytest.raises(ValueError, match="SLIME_AGENT_SANDBOX_RPC_RETRIES='many': a whole number was expected"):
        E2BSandbox("img")


def test_all_variables_may_have_their_older_prefix(monkeypatch):
    for name, value in [
        ("SANDBOX_IMAGE_METADATA_KEY", "key"), ("SANDBOX_LIFETIME_SEC", "7"), ("SANDBOX_RPC_RETRIES", "2"),
        ("E2B_SANDBOX_SIZE", "xl"),
    ]:  # fmt: skip
        monkeypatch.setenv(f"SWE_{name}", value)
    sb = E2BSandbox("img")
    assert (sb.image_metadata_key, sb.timeout, sb.rpc_retries, sb.size) == ("key", 7, 2, "xl")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "8")
    assert E2BSandbox("img").timeout == 8
    assert E2BSandbox("img", timeout=9).timeout == 9


async def test_commands_that_fail_are_results_unless_they_are_checked(e2b):
    async with E2BSandbox("img") as sb:
        e2b.errors = [CommandExitException(3)]
        assert await sb.exec("false") == (3, "out", "err")
        e2b.errors = [CommandExitException(3)]
        with pytest.raises(RuntimeError, match=r"exit code 3 in sandbox sb-1 of false: err"):
            await sb.exec("false", check=True)
        e2b.errors = [TimeoutException()]
        with pytest.raises(TimeoutError, match=r"not done within 120 s in sandbox sb-1: sleep"):
            await sb.exec("sleep 1000")
    assert [call[0] for call in e2b.calls] == ["create", "run", "run", "run", "kill"]


async def test_passing_failures_are_repeated_when_that_is_safe(e2b):
    async with E2BSandbox("img", rpc_retries=2) as sb:
        e2b.errors = [RateLimitException(), ConnectionResetError()]
        assert (await sb.exec("ls"))[0] == 0
        e2b.errors = [RateLimitException()] * 3
        with pytest.raises(RateLimitException):
            await sb.exec("ls")
        e2b.errors = [ConnectionResetError()]
        with pytest.raises(ConnectionResetError):
            await sb.exec("pay", idempotent=False)
        e2b.errors = [ValueError("wrong path")]
        with pytest.raises(ValueError, match="wrong path"):
            await sb.read_file("/a")
    assert [call[0] for call in e2b.calls] == ["create", *["run"] * 3, *["run"] * 3, "run", "read", "kill"]


async def test_pauses_grow_up_to_a_bound(e2b, monkeypatch):
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(e2b_sandbox, "BACKOFF_BASE_S", 1.0)
    monkeypatch.setattr(e2b_sandbox.asyncio, "sleep", sleep)
    async with E2BSandbox("img", rpc_retries=7) as sb:
        e2b.errors = [RateLimitException()] * 7
        await sb.exec("ls")
    bounds = [1, 2, 4, 8, 16, 32, 32]
    assert all(bound / 2 <= pause <= bound for bound, pause in zip(bounds, pauses, strict=True))


async def test_what_is_missing_is_said(monkeypatch, e2b, caplog):
    sb = E2BSandbox("img")
    with pytest.raises(RuntimeError, match="the sandbox of img is used outside its `async with` block"):
        await sb.exec("ls")
    async with sb:
        e2b.errors = [OSError("gone")]
    assert "could not end sandbox sb-1" in caplog.text
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ImportError, match="needs the package e2b, which is not installed: pip install e2b"):
        await sb.__aenter__()


def test_users_of_local_sandboxes_do_not_follow_from_a_seed():
    """Runs that have seeded alike would take the same one, and count each other's processes."""
    found = set()
    for _ in range(4):
        random.seed(7)
        found.add(local_sandbox._free_uid())
    assert len(found) > 1
