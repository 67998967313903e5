"""Finding generators by their task type, and running one in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import pkgutil
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_plugins.rollout_buffer import generator as built_in

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
_TAIL = 2000


def find_generators(modules: list[str]) -> dict[str, ModuleType]:
    """Return the modules with ``TASK_TYPE`` and ``run_rollout`` by their type: those of the package and ``modules``.

    Raises ValueError for a named module that has not both, and for two with one type.
    """
    names = [f"{built_in.__name__}.{module.name}" for module in pkgutil.iter_modules(built_in.__path__)]
    found: dict[str, ModuleType] = {}
    for name in [*names, *modules]:
        module = importlib.import_module(name)
        missing = [wanted for wanted in ("TASK_TYPE", "run_rollout") if not hasattr(module, wanted)]
        if missing and name in modules:
            raise ValueError(f"the generator {name} has no {' and no '.join(missing)}")
        if missing:
            continue
        other = found.setdefault(module.TASK_TYPE, module)
        if other is not module:
            raise ValueError(f"TASK_TYPE {module.TASK_TYPE!r} is that of {other.__name__} and of {name}")
    return found


class GeneratorProcess:
    """One generator at work: ``run_rollout(data)`` of ``module``, and every process that it starts."""

    def __init__(self, module: ModuleType, data: dict[str, Any]) -> None:
        self.module, self.data = module, data
        file, path = tempfile.mkstemp(prefix="slime-generator-", suffix=".log")
        os.close(file)
        self.log = Path(path)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin. What it prints goes into ``log``."""
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "slime_plugins.rollout_buffer.run_generator", self.module.__name__,
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it ended at once; its exit code says so
            self._process.stdin.write(json.dumps(self.data).encode())
            await self._process.stdin.drain()
        self._process.stdin.close()
        logger.info("generator %s runs as process %d, log %s", self.module.__name__, self._process.pid, self.log)

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """End it and what it started."""
        process = self._process
        if process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        self.log.unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """Return ``state`` (running, ended, failed), and of one that failed its exit code and last words."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return {"state": "running"}
        if code == 0:
            return {"state": "ended"}
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL))
            return {"state": "failed", "exit_code": code, "log": log.read().decode("utf-8", "replace")}
