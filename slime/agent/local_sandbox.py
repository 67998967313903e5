"""A sandbox of processes and a directory of this machine, for tests, small runs and code that is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from slime.agent.processes import Limits, end_all, has_variable, pids_where, run_captured, start_time
from slime.agent.shell_sandbox import ShellSandbox

logger = logging.getLogger(__name__)

DIRECTORIES = ("workspace", "tmp", "home/agent")
"""Paths of the sandbox that are its own."""
MARKER = "SLIME_SANDBOX"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
PREFIX = "slime-sandbox-"
_UIDS = range(700_000, 800_000)


@dataclass
class LocalSandbox(ShellSandbox):
    """A directory of this machine whose ``/workspace``, ``/tmp`` and ``/home/agent`` a command sees as its own.

    This is NOT a security boundary: commands see the machine's other files and its network. They have no variables of
    this process, limits, and their own user where slime runs as root; otherwise they have the rights of slime's user.
    There is one user: ``user`` is not looked at. ``async with`` ends every process that was started, also those that
    have left their session, and removes the directory. What a killed slime left behind goes when the next one makes its
    first sandbox.

    env: variables of all commands. path: directories that their ``PATH`` begins with. paths: how the three directories
    come about: "mounts" in a mount namespace, which needs the right to make one (root, or user namespaces); "words" by
    replacing their names in commands, variables and written scripts (text that begins with ``#!``), so that a program
    which makes up such a path misses them; by default mounts where they are allowed and hide no directory of ``path``
    (a ValueError where mounts are asked for and do). uid: the user of commands where
    slime runs as root, by default one that no one else has; 0 leaves them root, whom no limit of processes binds, say
    for a Python below ``/root``.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[str | Path] = ()
    limits: Limits = field(default_factory=Limits)
    paths: Literal["mounts", "words"] | None = None
    uid: int | None = None

    def __post_init__(self) -> None:
        self._root: Path | None = None
        self._holder: asyncio.subprocess.Process | None = None
        self._uid: int | None = None

    @property
    def sandbox_id(self) -> str:
        """The name of the directory; empty outside the ``async with`` block."""
        return "" if self._root is None else self._root.name

    @property
    def root(self) -> Path:
        """The directory. Raises RuntimeError outside the ``async with`` block."""
        if self._root is None:
            raise RuntimeError("the local sandbox is used outside its `async with` block")
        return self._root

    async def __aenter__(self) -> Self:
        hidden = [str(p) for p in self.path if any(Path(p).is_relative_to(f"/{own}") for own in DIRECTORIES)]
        if hidden and self.paths == "mounts":
            raise ValueError(
                f"path {', '.join(hidden)}: mounts hide this machine's /{', /'.join(DIRECTORIES)}; use words"
            )
        paths = self.paths or ("words" if hidden else default_paths())
        await asyncio.to_thread(sweep)
        self._uid = (_free_uid() if self.uid is None else self.uid or None) if os.geteuid() == 0 else None
        name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:12]}"
        self._root = Path(tempfile.gettempdir()).resolve() / name
        self._root.mkdir(mode=0o700)
        for directory in DIRECTORIES:
            (self._root / directory).mkdir(parents=True)
        if self._uid is not None:
            for directory in (".", "home", *DIRECTORIES):
                os.chown(self._root / directory, self._uid, self._uid)
        try:
            if paths == "mounts":
                await self._make_mounts()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        root, holder, uid = self.root, self._holder, self._uid
        namespace = held = None
        if holder is not None and holder.returncode is None:
            namespace = _mounts_of(holder.pid)
            if namespace == _mounts_of(os.getpid()):  # it was cancelled before it had one of its own
                holder.kill()
                namespace = None
            else:  # held open, its number is not given to a sandbox that starts while this one ends
                held = os.open(f"/proc/{holder.pid}/ns/mnt", os.O_RDONLY)

        def belongs(pid: int) -> bool:
            return (namespace is not None and _mounts_of(pid) == namespace) or _is_of(pid, root.name, uid)

        try:
            await asyncio.to_thread(end_all, belongs)
        except RuntimeError as e:  # what was done in the sandbox must not be lost for it
            logger.warning("sandbox %s: %s", root.name, e)
        finally:
            if held is not None:
                os.close(held)
        if holder is not None:
            await holder.wait()
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
        self._root = self._holder = None

    async def prepare_agent(self, workdir: str) -> None:
        """Make ``workdir``, in the place of ``ensure_agent_user``: there is one user, who owns what it makes."""
        await self.exec(f"mkdir -p {shlex.quote(workdir)}", check=True)

    async def _shell(
        self,
        cmd: str,
        *,
        user: str,
        env: Mapping[str, str],
        timeout: float,
        stdin: bytes = b"",
        output_bytes: int | None = None,
    ) -> tuple[int, str, str]:
        root, number = self.root, uuid.uuid4().hex[:8]
        mark = f"{root.name}/{number}"
        home = {"HOME": "/home/agent", "TMPDIR": "/tmp", "USER": "agent", "LANG": "C.UTF-8"}
        variables = {"PATH": SYSTEM_PATH, **home, **self.env, **env}
        if self._holder is None:
            variables = {name: self._in_words(value) for name, value in variables.items()}
            cmd, enter, uid = self._in_words(cmd), [_tool("bash")], self._uid
        else:
            enter, uid = self._entering(), None
        variables["PATH"] = ":".join([*map(str, self.path), variables["PATH"]])
        workspace = str(root / "workspace") if self._holder is None else "/workspace"
        ulimit = await asyncio.to_thread(self._ulimits)
        start = [*enter, "-c", f'{ulimit} && cd "$0" && exec "$BASH" -c "$1"', workspace, cmd]
        try:
            return await run_captured(
                start, env={**variables, MARKER: mark}, stdin=stdin, timeout=timeout, uid=uid,
                output_bytes=output_bytes or self.limits.output_bytes,
            )  # fmt: skip
        except BaseException as e:
            await asyncio.to_thread(end_all, lambda pid: _is_marked(pid, mark))
            if isinstance(e, TimeoutError):
                raise TimeoutError(f"not done within {timeout:g} s in sandbox {self.sandbox_id}: {cmd}") from e
            raise

    def _ulimits(self) -> str:
        processes = self.limits.processes
        if self._uid is None:
            processes += _tasks_of(os.geteuid())
        kib = self.limits.memory_bytes >> 10
        return (
            f"ulimit -c 0 && ulimit -t {self.limits.cpu_s} && ulimit -v {kib} && "
            f"ulimit -f {self.limits.file_bytes >> 10} && ulimit -u {processes}"
        )

    def _in_words(self, text: str) -> str:
        """``text`` with the sandbox's own paths replaced by those of this machine."""
        names = "|".join(DIRECTORIES)
        pattern = rf"(?<![\w./~-])(?!{re.escape(str(self.root))})/({names})(?![\w.-])"
        return re.sub(pattern, lambda found: f"{self.root}/{found[1]}", text)

    def _written(self, content: bytes) -> bytes:
        if self._holder is None and content.startswith(b"#!"):
            return self._in_words(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        return content

    async def _make_mounts(self) -> None:
        """Start a process that holds the mount namespace, whose root has the directories in their places."""
        self._holder = await asyncio.create_subprocess_exec(
            *_unshare(), _tool("bash"), "-c", _MOUNTS, "bash", str(self.root), env={"PATH": SYSTEM_PATH},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if (await self._holder.stdout.readline()).strip() != b"ready":
            _, err = await self._holder.communicate()
            self._holder = None
            raise RuntimeError(
                f"no mount namespace for a local sandbox: {err.decode().strip()}; LocalSandbox(paths='words') works "
                "without one"
            )

    def _entering(self) -> list[str]:
        assert self._holder is not None
        into = [_tool("nsenter"), "--target", str(self._holder.pid), "--mount", "--root", "--wd"]
        bash = _tool("bash")
        if os.geteuid() != 0:  # of a user namespace, in which slime's user has to be root to mount
            ids = [f"--map-user={os.geteuid()}", f"--map-group={os.getegid()}"]
            return [*into, "--user", "--preserve-credentials", _tool("unshare"), "--user", *ids, bash]
        if self._uid is None:
            return [*into, bash]
        become = [f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups", "--no-new-privs"]
        return [*into, _tool("setpriv"), *become, bash]


_MOUNTS = r"""
set -e
new=$1/root
mkdir "$new"
mount -t tmpfs tmpfs "$new"
directories=("$new/home" "$new/old")
links=() files=() table=
escaped() {
    path=${1//\\/\\134}
    path=${path// /\\040}
    path=${path//$'\t'/\\011}
    path=${path//$'\n'/\\012}
}
bind() {
    escaped "$1"
    table+="$path "
    escaped "$2"
    table+="$path none $3"$'\n'
}
for entry in /* /home/*; do
    case $entry in /tmp|/workspace|/home|/home/agent|/old) continue ;; esac
    if [ -L "$entry" ]; then links+=("$entry")
    elif [ -d "$entry" ]; then directories+=("$new$entry"); bind "$entry" "$new$entry" rbind
    elif [ -e "$entry" ]; then files+=("$new$entry"); bind "$entry" "$new$entry" bind
    fi
done
for own in workspace tmp home/agent; do
    directories+=("$new/$own")
    bind "$1/$own" "$new/$own" bind
done
mkdir "${directories[@]}"
for file in "${files[@]}"; do : > "$file"; done
[ -z "${links[*]}" ] || cp -P --parents "${links[@]}" "$new"
printf %s "$table" > "$1/fstab"
mount --all --fstab "$1/fstab"
rm "$1/fstab"
chmod 755 "$new"
cd "$new"
pivot_root . old
umount -l old
rmdir old
cd /
echo ready
exec sleep infinity
"""
"""In a mount namespace: a new root with the directories of ``$1`` and all others of this machine; then wait.

One ``mkdir``, ``cp`` and ``mount`` for all entries of the root: one of each per entry takes four times as long.
"""


def _tool(name: str) -> str:
    """The path of a program of this machine, regardless of the sandbox's ``PATH``."""
    return shutil.which(name, path=SYSTEM_PATH) or name


def _unshare() -> list[str]:
    return [_tool("unshare"), "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]


def _free_uid() -> int:
    """Return a user that owns no other sandbox: what it runs ends with the sandbox."""
    taken = set()
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            taken.add(directory.stat().st_uid)
    while (uid := secrets.choice(_UIDS)) in taken:  # not by the random numbers that a run may have seeded
        pass
    return uid


@functools.cache
def default_paths() -> Literal["mounts", "words"]:
    """Return "mounts" where this process may make mount namespaces."""
    if not all(shutil.which(tool, path=SYSTEM_PATH) for tool in ("unshare", "nsenter", "setpriv", "pivot_root")):
        return "words"
    made = subprocess.run([*_unshare(), "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, check=False)
    return "mounts" if made.returncode == 0 else "words"


@functools.cache
def sweep() -> None:
    """End the processes and remove the directories of sandboxes whose slime has ended; once per process."""

    def is_left(name: str) -> bool:
        pid, _, started = name.removeprefix(PREFIX).rpartition("-")[0].partition("-")
        try:
            return start_time(int(pid)) != started
        except OSError:
            return True
        except ValueError:  # not named by this module
            return False

    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_left(directory.name):
            logger.info("removing %s, a sandbox of a process that has ended", directory)
            uid = directory.stat().st_uid
            end_all(functools.partial(_is_of, name=directory.name, uid=uid if uid in _UIDS else None))
            shutil.rmtree(directory, ignore_errors=True)


def _is_of(pid: int, name: str, uid: int | None) -> bool:
    return (uid is not None and os.stat(f"/proc/{pid}").st_uid == uid) or _is_marked(pid, name)


def _is_marked(pid: int, name: str) -> bool:
    return has_variable(pid, f"{MARKER}={name}")


def _mounts_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")


def _tasks_of(uid: int) -> int:
    """Return how many threads the processes of a user have, which is what its limit of processes counts."""
    return sum(
        len(os.listdir(f"/proc/{pid}/task")) for pid in pids_where(lambda p: os.stat(f"/proc/{p}").st_uid == uid)
    )
