"""Sandboxes of E2B, and of services that speak its protocol."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKOFF_BASE_S, BACKOFF_CAP_S = 1.0, 32.0
_TRANSIENT_NAMES = {
    "RateLimitException", "ServiceBusyException", "GuestUnresponsiveException", "SandboxUnreachableException",
}  # fmt: skip
_TRANSPORTS = {"httpx", "httpcore", "h2", "pyqwest", "connectrpc"}


class E2BSandbox:
    """A sandbox of E2B from the container ``image``.

    ``timeout`` (s, ``SLIME_AGENT_SANDBOX_LIFETIME_SEC``, 3600) bounds its lifetime. Services that take the
    image in the sandbox's metadata need the key for it (``image_metadata_key``,
    ``SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY``); the template is then ``size`` (``SLIME_AGENT_E2B_SANDBOX_SIZE``, md),
    without a key it is the image. Calls that fail for a transient reason are repeated ``rpc_retries`` times
    (``SLIME_AGENT_SANDBOX_RPC_RETRIES``, 6), with increasing pauses, unless they may not be. All four variables are
    also read with ``SWE_`` for ``SLIME_AGENT_``.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        self.image = image
        self.timeout = _integer("SLIME_AGENT_SANDBOX_LIFETIME_SEC", 3600) if timeout is None else timeout
        self.rpc_retries = _integer("SLIME_AGENT_SANDBOX_RPC_RETRIES", 6) if rpc_retries is None else rpc_retries
        self.size = size or _variable("SLIME_AGENT_E2B_SANDBOX_SIZE") or "md"
        self.image_metadata_key = image_metadata_key or _variable("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY")
        self._sandbox: Any = None

    @property
    def sandbox_id(self) -> str:
        """E2B's id; empty outside the ``async with`` block."""
        return "" if self._sandbox is None else str(self._sandbox.sandbox_id)

    async def __aenter__(self) -> Self:
        try:
            from e2b import AsyncSandbox
        except ImportError as e:
            raise ImportError("E2BSandbox needs the package e2b, which is not installed: pip install e2b") from e
        key = self.image_metadata_key
        chosen = {"template": self.size, "metadata": {key: self.image}} if key else {"template": self.image}
        self._sandbox = await self._call(
            lambda: AsyncSandbox.create(timeout=self.timeout, **chosen), "create a sandbox"
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        sandbox, self._sandbox = self._sandbox, None
        try:
            await sandbox.kill()
        except Exception as e:  # noqa: BLE001  (what was done in the sandbox must not be lost for it)
            logger.warning("could not end sandbox %s, which will end by itself: %s", sandbox.sandbox_id, e)

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> tuple[int, str, str]:
        """Run ``cmd``; see ``slime.agent.sandbox.Sandbox``. Raises TimeoutError after ``timeout`` s."""
        sandbox = self._running()

        async def run() -> tuple[int, str, str]:
            try:
                done = await sandbox.commands.run(cmd, user=user, envs=dict(env or {}), timeout=timeout)
            except Exception as e:
                if _names(e) & _TRANSIENT_NAMES:
                    raise
                if "TimeoutException" in _names(e):
                    raise TimeoutError(f"not done within {timeout:g} s in sandbox {self.sandbox_id}: {cmd}") from e
                if not hasattr(e, "exit_code"):
                    raise
                done = e  # a command that fails is an exception with the result's fields
            return int(done.exit_code), done.stdout or "", done.stderr or ""

        code, out, err = await self._call(run, f"run {cmd[:80]!r}", repeat=idempotent)
        if check and code != 0:
            raise RuntimeError(f"exit code {code} in sandbox {self.sandbox_id} of {cmd}: {(err or out)[-2000:]}")
        return code, out, err

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write text, bytes, or the file of this machine that a Path names."""
        data = await asyncio.to_thread(content.read_bytes) if isinstance(content, Path) else content
        files = self._running().files
        await self._call(lambda: files.write(sandbox_path, data, user=user), f"write {sandbox_path}")

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file."""
        files = self._running().files
        return str(await self._call(lambda: files.read(sandbox_path, user=user), f"read {sandbox_path}"))

    def _running(self) -> Any:
        if self._sandbox is None:
            raise RuntimeError(f"the sandbox of {self.image} is used outside its `async with` block")
        return self._sandbox

    async def _call(self, call: Callable[[], Awaitable[T]], what: str, *, repeat: bool = True) -> T:
        attempt = 0
        while True:
            try:
                return await call()
            except Exception as e:
                if not (repeat and is_transient(e)) or attempt >= self.rpc_retries:
                    raise
                pause = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2**attempt) * random.uniform(0.5, 1.0)
                attempt += 1
                logger.warning("%s failed (%s: %s); again in %.1f s", what, type(e).__name__, e, pause)
            await asyncio.sleep(pause)


def is_transient(error: BaseException) -> bool:
    """Return True if a call that failed like this may succeed when it is repeated: lost connections, busy services."""
    if isinstance(error, ConnectionError) or _names(error) & _TRANSIENT_NAMES:
        return True
    return any(cls.__module__.partition(".")[0] in _TRANSPORTS for cls in type(error).__mro__)


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _variable(name: str) -> str | None:
    """The environment variable ``name``, or the one with the prefix of older scripts."""
    return os.environ.get(name) or os.environ.get(name.replace("SLIME_AGENT_", "SWE_", 1))


def _integer(name: str, default: int) -> int:
    text = _variable(name)
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r}: a whole number was expected") from None
