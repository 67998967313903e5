"""All sandboxes agree: files, variables, limits of time, memory, processes and output, and leftovers.

``LocalSandbox`` in both ways that it has of placing its directories, ``DockerSandbox`` where a daemon runs, and
``E2BSandbox`` over a client that runs in a local sandbox what the service would run in its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.agent import docker_sandbox, local_sandbox, sandbox
from slime.agent.harness.common import HOME_OF_AGENT
from slime.agent.local_sandbox import PREFIX, default_paths, sweep
from slime.agent.processes import end_all, pids_where, start_time
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    DockerSandbox,
    E2BSandbox,
    Limits,
    LocalSandbox,
    Sandbox,
    ensure_agent_user,
    exec_and_wait,
)

LIMITS = Limits(memory_bytes=256 << 20, file_bytes=8 << 20, processes=40, output_bytes=100_000)
IMAGE = "debian:stable-slim"


class TimeoutException(Exception):
    """The name by which E2B's package reports it."""


def e2b_client(limits: Limits) -> ModuleType:
    """E2B's package, over a local sandbox."""

    class CommandExitException(Exception):
        def __init__(self, code: int, out: str, err: str) -> None:
            super().__init__(f"exit code {code}")
            self.exit_code, self.stdout, self.stderr = code, out, err

    class AsyncSandbox:
        def __init__(self, local: LocalSandbox) -> None:
            self.local, self.sandbox_id = local, local.sandbox_id
            self.commands = SimpleNamespace(run=self.run)
            self.files = SimpleNamespace(write=self.write, read=local.read_file)

        @classmethod
        async def create(cls, **options: Any) -> AsyncSandbox:
            return cls(await LocalSandbox(limits=limits).__aenter__())

        async def run(self, cmd: str, *, user: str, envs: dict[str, str], timeout: float) -> Any:
            if "useradd" in cmd:  # what root does there
                cmd = f"id() {{ :; }}; chown() {{ :; }}; git() {{ :; }}; {cmd}"
            try:
                code, out, err = await self.local.exec(cmd, user=user, env=envs, timeout=timeout)
            except TimeoutError as e:
                raise TimeoutException(str(e)) from e
            if code:
                raise CommandExitException(code, out, err)
            return SimpleNamespace(exit_code=code, stdout=out, stderr=err)

        async def write(self, path: str, data: Any, *, user: str) -> None:
            await self.local.write_file(path, data, user=user)

        async def kill(self) -> None:
            await self.local.__aexit__()

    module = ModuleType("e2b")
    module.AsyncSandbox = AsyncSandbox  # type: ignore[attr-defined]
    return module


def has_docker() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=20).returncode == 0
    return False


Make = Callable[[], Any]


@pytest.fixture(params=["mounts", "words", "docker", "e2b"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "docker" and not has_docker():
        pytest.skip("no Docker daemon")
    if request.param == "mounts" and default_paths() != "mounts":
        pytest.skip("mount namespaces are not allowed here")
    return str(request.param)


@pytest.fixture
def make(kind: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setitem(sys.modules, "e2b", e2b_client(LIMITS))
    kinds: dict[str, Make] = {
        "docker": lambda: DockerSandbox(IMAGE, limits=LIMITS),
        "e2b": lambda: E2BSandbox("image"),
        "mounts": lambda: LocalSandbox(limits=LIMITS, paths="mounts"),
        "words": lambda: LocalSandbox(limits=LIMITS, paths="words"),
    }
    return kinds[kind]


@pytest.fixture
def limited(kind: str) -> None:
    if kind == "e2b":
        pytest.skip("limits are the service's")


@pytest.fixture
async def box(make: Make) -> AsyncIterator[Any]:
    async with make() as sb:
        yield sb


def alive(*words: str) -> list[int]:
    """Processes of this machine, containers included, whose command line is ``words``."""
    wanted = "\0".join(words).encode() + b"\0"
    return list(pids_where(lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes() == wanted))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_commands(box):
    assert isinstance(box, Sandbox)
    assert box.sandbox_id
    assert await box.exec("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    assert (await box.exec("cat <<< 'bash: '$A", env={"A": 'it\'s "so"'}))[1] == 'bash: it\'s "so"\n'
    with pytest.raises(RuntimeError, match=r"exit code 4 .* of .*lost"):
        await box.exec("echo lost >&2; exit 4", check=True)


async def test_files(box, tmp_path):
    (tmp_path / "here").write_bytes("von hier ü".encode())
    for path, content in [
        ("/workspace/new/dir/a.txt", "text ü\n" * 3), (f"{HOME_OF_AGENT}/it's", tmp_path / "here"),
        ("/workspace/empty", ""), ("/workspace/big", "0123456789" * 50_000), ("/tmp/b", b"\x00\x01"),
    ]:  # fmt: skip
        await box.write_file(path, content)
        data = content.read_text() if isinstance(content, Path) else content
        assert await box.read_file(path) == (data if isinstance(data, str) else data.decode())
    assert (await box.exec("cat /workspace/new/dir/a.txt | wc -l; wc -c < /tmp/b"))[1] == "3\n2\n"
    await box.exec("printf made > /workspace/made", check=True)
    assert await box.read_file("/workspace/made") == "made"
    with pytest.raises(OSError, match=r"/workspace/none could not be read .*No such file"):
        await box.read_file("/workspace/none")


async def test_long_commands(box):
    await ensure_agent_user(box, "/workspace/repo")
    options: dict[str, Any] = {"tag": "t", "user": "agent", "time_budget_sec": 60, "want_output": True}
    cmd = "sleep 0.2; pwd > /tmp/where; cat /tmp/where; exit 5"
    code, out = await exec_and_wait(box, cmd=cmd, workdir="/workspace/repo", **options)
    assert code == 5
    assert out.endswith("/workspace/repo\n")
    options["time_budget_sec"] = 0.3
    code, out = await exec_and_wait(box, cmd="echo begun; sleep 4321", **options)
    assert (code, out) == (EXIT_TIME_BUDGET_EXCEEDED, "begun\n")
    await until(lambda: not alive("sleep", "4321"))


async def test_no_variable_of_this_process_is_seen(make, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "very-secret-value")
    async with make() as box:
        _, out, _ = await box.exec("env; cat /proc/self/environ | tr '\\0' '\\n'")
    assert "very-secret-value" not in out
    assert "PATH=" in out


async def test_sandboxes_do_not_share_their_directories(make):
    async with make() as one, make() as other:
        for path in ("/workspace/x", "/tmp/x", f"{HOME_OF_AGENT}/x"):
            await one.write_file(path, "mine")
            with pytest.raises(OSError, match="No such file"):
                await other.read_file(path)
    assert not Path("/workspace/x").exists()
    assert not Path("/tmp/x").exists()


async def test_paths_do_not_lead_out(box, tmp_path):
    """Neither dots nor links reach files of this machine that the sandbox's user has no right to.

    Where the sandbox has a file of that name, it is one of its own.
    """
    name, secret = f"slime-escape-{os.getpid()}", tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    await box.exec(f"ln -s {secret} /workspace/link; ln -s / /workspace/root", check=True)
    paths = [f"/workspace/../../../etc/{name}/deep"]
    if os.geteuid() == 0:  # else a local sandbox has the rights of this user
        paths += ["/workspace/link", f"/workspace/root{secret}", f"/workspace/../../../..{secret}"]
    for path in paths:
        with contextlib.suppress(OSError):
            assert await box.read_file(path) != "secret"
        with contextlib.suppress(OSError):
            await box.write_file(path, "changed")
    assert secret.read_text() == "secret"
    assert not Path(f"/etc/{name}").exists()


async def test_time(box):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done within 0.4 s in .*sleep 4322"):
        await box.exec("trap '' TERM INT; sleep 4322 & sleep 4322", timeout=0.4)
    assert time.monotonic() - begin < 20
    await until(lambda: not alive("sleep", "4322"))
    assert (await box.exec("echo well"))[1] == "well\n"


@pytest.mark.usefixtures("limited")
async def test_memory(box):
    code, _, _ = await box.exec("dd if=/dev/zero of=/dev/null bs=1G count=1")  # which reads into one block of memory
    assert code != 0
    assert (await box.exec("echo well"))[1] == "well\n"


@pytest.mark.usefixtures("limited")
async def test_processes(box):
    """A fork bomb ends with its time, and has never more processes than it may."""
    before = len(alive("sleep", "4323"))
    counts = []

    async def count() -> None:
        while True:
            counts.append(len(alive("sleep", "4323")))
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(count())
    with contextlib.suppress(TimeoutError):
        await box.exec("bomb() { sleep 4323 & bomb & bomb; }; bomb", timeout=1.0)
    watching.cancel()
    assert 0 < max(counts) - before <= LIMITS.processes
    await until(lambda: not alive("sleep", "4323"))
    assert (await box.exec("echo well"))[1] == "well\n"


@pytest.mark.usefixtures("limited")
async def test_output(box):
    code, out, err = await box.exec("head -c 3000000 /dev/zero | tr '\\0' x; head -c 200000 /dev/zero >&2")
    assert code == 0
    assert out.startswith("x" * 1000)
    assert LIMITS.output_bytes <= len(out) < LIMITS.output_bytes + 100
    assert out.endswith("\n[2900000 bytes left out]\n")
    assert err.endswith("\n[100000 bytes left out]\n")
    with pytest.raises(TimeoutError):
        await box.exec("yes", timeout=0.5)


@pytest.mark.usefixtures("limited")
async def test_file_size(box):
    code, _, _ = await box.exec("head -c 20000000 /dev/zero > /workspace/large")
    assert code != 0
    assert int((await box.exec("wc -c < /workspace/large"))[1]) <= LIMITS.file_bytes


async def test_nothing_outlives_the_sandbox(make):
    async with make() as box:
        await box.exec("sleep 4324 & setsid nohup sleep 4324 > /dev/null 2>&1 & disown -a; true", check=True)
        await box.exec("nohup setsid bash -c 'trap \"\" TERM; (sleep 4324; true) & wait' > /dev/null 2>&1 & true")
        await until(lambda: len(alive("sleep", "4324")) == 3)
    await until(lambda: not alive("sleep", "4324"))


async def test_a_command_in_the_background_does_not_hold_the_answer_up(box):
    begin = time.monotonic()
    assert (await box.exec("echo first; sleep 4325 &"))[:2] == (0, "first\n")
    assert time.monotonic() - begin < 30
    assert alive("sleep", "4325")


async def test_used_outside_its_block(make):
    box = make()
    assert box.sandbox_id == ""
    with pytest.raises(RuntimeError, match="used outside its `async with` block"):
        await box.exec("true")


# Local sandboxes alone


async def test_processes_that_have_hidden_their_variables_end_too(tmp_path):
    """By the sandbox's user, or its mounts; a user who may neither has them left."""
    if os.geteuid() != 0 and default_paths() != "mounts":
        pytest.skip("neither root nor a mount namespace")
    async with LocalSandbox() as box:
        await box.exec("env -i setsid sleep 4326 > /dev/null 2>&1 & true")
        await until(lambda: bool(alive("sleep", "4326")))
    assert not alive("sleep", "4326")


async def test_what_starts_while_a_sandbox_ends_is_left_alone(monkeypatch):
    """The kernel gives the number of a mount namespace to another one as soon as no process holds it."""
    if default_paths() != "mounts":
        pytest.skip("mount namespaces are not allowed here")
    numbers: list[str] = []

    def end_and_start_others(belongs: Callable[[int], bool]) -> None:
        end_all(belongs)
        for _ in range(50):
            numbers.append(
                subprocess.check_output([*local_sandbox._unshare(), "readlink", "/proc/self/ns/mnt"], text=True)
            )

    monkeypatch.setattr(local_sandbox, "end_all", end_and_start_others)
    async with LocalSandbox(paths="mounts") as box:
        assert box._holder is not None
        own = os.readlink(f"/proc/{box._holder.pid}/ns/mnt")
    assert numbers
    assert own not in [number.strip() for number in numbers]


async def test_sandboxes_do_not_share_a_user(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("commands of a local sandbox have slime's user")
    monkeypatch.setattr(local_sandbox, "_UIDS", range(700_000, 700_008))
    async with contextlib.AsyncExitStack() as stack:
        uids = set()
        for _ in range(8):
            box = await stack.enter_async_context(LocalSandbox())
            uids.add((await box.exec("id -u"))[1].strip())
    assert len(uids) == 8


async def test_a_sandbox_whose_slime_was_killed_is_removed_by_the_next():
    code = (
        "import asyncio, os, signal\n"
        "from slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    box = await LocalSandbox().__aenter__()\n"
        "    await box.exec('env -i setsid sleep 4327 > /dev/null 2>&1 & setsid sleep 4327 > /dev/null 2>&1 & true')\n"
        "    print(box.root, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    root = Path(done.stdout.strip())
    assert root.name.startswith(PREFIX), done.stderr
    assert root.is_dir()
    sweep.cache_clear()
    async with LocalSandbox() as box:
        assert box.root.is_dir()
        sweep.cache_clear()
        sweep()  # those of a living process stay
        assert box.root.is_dir()
    assert not root.exists()
    if os.geteuid() == 0:
        assert not alive("sleep", "4327")
    else:
        assert len(alive("sleep", "4327")) <= 1  # the one without variables
        for pid in alive("sleep", "4327"):
            os.kill(pid, 9)


OTHER_USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
AS_OTHER_USER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from slime.agent.local_sandbox import LocalSandbox, default_paths
from slime.agent.processes import Limits

async def main():
    for paths in {default_paths(), "words"}:
        async with LocalSandbox(paths=paths, limits=Limits(processes=30)) as box:
            code, out, _ = await box.exec("id -u; ulimit -u; touch /tmp/x ~/y; ls -d /workspace")
            user, processes, workspace = out.split()
            assert (code, user) == (0, str(os.geteuid())), (code, user)
            assert 30 <= int(processes) < 1000, processes
            assert workspace == ("/workspace" if paths == "mounts" else f"{box.root}/workspace")
            await box.exec("setsid sleep 4330 > /dev/null 2>&1 & true")
            try:
                await box.exec("setsid sleep 4330 & sleep 4330", timeout=0.3)
            except TimeoutError:
                pass
            else:
                raise AssertionError("no TimeoutError")
    print("well")

asyncio.run(main())
"""


async def test_a_slime_that_is_not_root():
    if os.geteuid() != 0:
        pytest.skip("the other tests are of one")
    root = str(Path(sandbox.__file__).parents[2])
    usable = f"import sys; sys.path.insert(0, {root!r}); import slime.agent.local_sandbox"
    with contextlib.suppress(OSError):
        if subprocess.run([*OTHER_USER, "-c", usable], capture_output=True, check=False).returncode == 0:
            done = await asyncio.to_thread(
                subprocess.run, [*OTHER_USER, "-c", AS_OTHER_USER, root], capture_output=True, text=True, check=False
            )
            assert (done.stdout, done.stderr) == ("well\n", "")
            assert not alive("sleep", "4330")
            return
    pytest.skip("no Python and no slime that another user may read")


# Docker's command line, where there is no daemon


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command ``docker`` that keeps its words, prints what ``replies`` has for the first, and runs ``exec`` here."""
    script = tmp_path / "bin" / "docker"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> {tmp_path}/calls\n"
        f"case $1 in run) echo abc123;; ps) cat {tmp_path}/ps;; exec)\n"
        'while [ "$1" != abc123 ]; do shift; done; shift; exec "$@";; esac\n'
    )
    script.chmod(0o755)
    (tmp_path / "ps").write_text("")
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(docker_sandbox, "_SWEPT", [])
    monkeypatch.setattr(docker_sandbox, "_DIRECTORIES", "true")
    return tmp_path


async def test_docker_is_called_with_the_limits(docker):
    limits = Limits(memory_bytes=1 << 30, processes=50, cpus=1.5)
    host = docker_sandbox.socket.gethostname()
    (docker / "ps").write_text(
        f"dead {host}:{os.getpid()}:1\nmine {docker_sandbox.owner()}\nelsewhere other:1:1\ngone {host}:4194305:1\n"
    )
    async with DockerSandbox("img", limits=limits, network="none", lifetime=60, arguments=["--gpus", "all"]) as box:
        assert box.sandbox_id == "abc123"
        assert await box.exec("echo $A $B; exit 3", user="agent", env={"A": "1", "B": "2"}) == (3, "\n", "")
        await box.write_file(f"{docker}/deep/file", "text", user="agent")
        assert await box.read_file(f"{docker}/deep/file") == "text"
    calls = (docker / "calls").read_text().splitlines()
    assert calls[0].startswith("ps --all --filter label=slime.sandbox.owner --format")
    assert calls[1:3] == ["rm --force dead", "rm --force gone"]
    assert calls[3] == (
        f"run --detach --rm --init --label slime.sandbox.owner={host}:{os.getpid()}:{start_time(os.getpid())} "
        "--network none --memory 1073741824 --memory-swap 1073741824 --pids-limit 50 --cpus 1.5 --user root --gpus all "
        "--entrypoint sleep img 60"
    )
    assert any(call.startswith("exec --user agent --env A=1 --env B=2 abc123 setsid --wait bash -c") for call in calls)
    assert any(call.startswith("exec --interactive --user agent abc123") for call in calls)
    assert calls[-1] == "rm --force abc123"


async def test_docker_kills_what_takes_too_long(docker):
    async with DockerSandbox("img") as box:
        with pytest.raises(TimeoutError, match=r"not done within 0.5 s in container abc123: sleep 4328"):
            await box.exec("sleep 4328 & sleep 4328", timeout=0.5)
        await until(lambda: not alive("sleep", "4328"))


async def test_docker_that_is_not_there_or_refuses(docker, monkeypatch):
    (docker / "bin" / "docker").write_text("#!/bin/bash\necho no daemon >&2; exit 1\n")
    with pytest.raises(RuntimeError, match=r"docker ps .* ended with 1: no daemon"):
        await DockerSandbox("img").__aenter__()
    monkeypatch.setattr(docker_sandbox, "_SWEPT", [])
    monkeypatch.setenv("PATH", str(docker))
    with pytest.raises(RuntimeError, match="needs the command docker"):
        await DockerSandbox("img").__aenter__()


async def test_programs_that_mounts_would_hide(tmp_path: Path) -> None:
    program = tmp_path / "answer"
    program.write_text("#!/bin/sh\necho 42\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match="mounts hide this machine's /workspace, /tmp"):
        await LocalSandbox(path=["/tmp/bin"], paths="mounts").__aenter__()
    async with LocalSandbox(path=[tmp_path], uid=0) as box:  # below /tmp, as a rule
        assert (await box.exec("answer"))[1] == "42\n"
