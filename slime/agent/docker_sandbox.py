"""Containers of a Docker daemon as sandboxes."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from slime.agent.processes import Limits, run_captured, start_time
from slime.agent.shell_sandbox import ShellSandbox

logger = logging.getLogger(__name__)

OWNER_LABEL = "slime.sandbox.owner"
"""The owner of a container: host, process id and start time of the slime that made it."""
CONTROL_TIMEOUT_S = 600.0
"""For starting a container, the pull of its image included, and for removing it."""
_DIRECTORIES = "mkdir -p /workspace /home/agent && chmod 1777 /workspace /tmp"


@dataclass
class DockerSandbox(ShellSandbox):
    """A container from ``image``, which needs bash and util-linux, by the command ``docker``, which needs a daemon.

    The container has the memory, processes and cores of ``limits``, the ``network`` of that name ("none" for no
    network, "host" for this machine's) and ends after ``lifetime`` s. ``arguments`` are more words for
    ``docker run``. Containers of a slime that was killed are removed when the next one on this host makes its first.
    """

    image: str
    limits: Limits = field(default_factory=Limits)
    network: str = "bridge"
    lifetime: int = 3600
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._id = ""

    @property
    def sandbox_id(self) -> str:
        """The container's id; empty outside the ``async with`` block."""
        return self._id

    async def __aenter__(self) -> Self:
        await sweep()
        memory = str(self.limits.memory_bytes)
        self._id = (
            await _docker(
                "run", "--detach", "--rm", "--init", "--label", f"{OWNER_LABEL}={owner()}", "--network", self.network,
                "--memory", memory, "--memory-swap", memory, "--pids-limit", str(self.limits.processes),
                "--cpus", f"{self.limits.cpus:g}", "--user", "root", *self.arguments,
                "--entrypoint", "sleep", self.image, str(self.lifetime),
            )
        ).strip()  # fmt: skip
        try:
            await self.exec(_DIRECTORIES, check=True)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        container, self._id = self._id, ""
        try:
            await _docker("rm", "--force", container)
        except RuntimeError as e:  # what was done in the sandbox must not be lost for it
            logger.warning("could not remove container %s, which will end by itself: %s", container, e)

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
        if not self._id:
            raise RuntimeError(f"the sandbox of {self.image} is used outside its `async with` block")
        pid_file = f"/tmp/.slime-{uuid.uuid4().hex[:12]}.pid"
        limits = f"ulimit -c 0; ulimit -t {self.limits.cpu_s}; ulimit -f {self.limits.file_bytes >> 10}"
        where = "if [ -d /workspace ]; then cd /workspace; fi"
        # the shell leads a new session in the container: its id is that of all it starts, and stays for a kill
        run = f'echo $$ > {pid_file}; {limits}; {where}; bash -c "$0"; code=$?; rm -f {pid_file}; exit $code'
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        attach = ["--interactive"] if stdin else []
        inside = ["setsid", "--wait", "bash", "-c", run, cmd]
        try:
            return await run_captured(
                ["docker", "exec", *attach, "--user", user, *variables, self._id, *inside],
                stdin=stdin, timeout=timeout, output_bytes=output_bytes or self.limits.output_bytes,
            )  # fmt: skip
        except TimeoutError as e:
            await self._kill(pid_file)
            raise TimeoutError(f"not done within {timeout:g} s in container {self._id[:12]}: {cmd}") from e
        except asyncio.CancelledError:
            await self._kill(pid_file)
            raise

    async def _kill(self, pid_file: str) -> None:
        file = shlex.quote(pid_file)
        kill = f"p=$(cat {file}) && kill -KILL -- -$p; rm -f {file}"
        try:
            await _docker("exec", "--user", "root", self._id, "bash", "-c", kill)
        except RuntimeError as e:
            logger.warning("container %s: a command that took too long was not killed: %s", self._id[:12], e)


def owner() -> str:
    """Return the label of containers of this process."""
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{start_time(pid)}"


async def sweep() -> None:
    """Remove the containers of processes of this host that have ended; once per process."""
    if _swept():
        return
    filters = ["--all", "--filter", f"label={OWNER_LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}']
    for line in (await _docker("ps", *filters)).splitlines():
        container, _, label = line.partition(" ")
        host, pid, started = label.rsplit(":", 2)
        if host == socket.gethostname() and not _is_alive(pid, started):
            logger.info("removing container %s of a process that has ended", container)
            await _docker("rm", "--force", container)


_SWEPT: list[int] = []


def _swept() -> bool:
    """Return True if this was called before in this process."""
    if os.getpid() in _SWEPT:
        return True
    _SWEPT.append(os.getpid())
    return False


def _is_alive(pid: str, started: str) -> bool:
    try:
        return start_time(int(pid)) == started
    except OSError:
        return False


async def _docker(*words: str) -> str:
    """Return what ``docker`` prints. Raises RuntimeError with its errors where it fails or is not there."""
    try:
        code, out, err = await run_captured(["docker", *words], timeout=CONTROL_TIMEOUT_S, output_bytes=1 << 20)
    except FileNotFoundError as e:
        raise RuntimeError("DockerSandbox needs the command docker, which is not on the PATH") from e
    if code != 0:
        raise RuntimeError(f"docker {shlex.join(words)} ended with {code}: {err.strip()[-2000:]}")
    return out
