"""A SGLang server as anybody starts it: nothing of slime's is in it but stand-ins for packages without a CPU build.

With slime's plug-in its weight checker, and prefill and decode engines, work without CUDA.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime.backends.sglang_utils.environment import CPU_DEFAULTS, CPU_STANDINS, DEFAULTS, ENGINE_PLUGIN
from slime.backends.sglang_utils.ports import reserve_ports
from slime.servers.engine_client import EngineClient

READY_S = 240.0


class PlainEngine:
    """``python -m sglang.launch_server`` on a port of its own, which it keeps when it is started again."""

    def __init__(self, checkpoint: Path, log: Path, key: str, *more: str, plugin: bool = False) -> None:
        self.log, self.key = log, key
        self._path = os.pathsep.join(map(str, [CPU_STANDINS, ENGINE_PLUGIN] if plugin else [CPU_STANDINS]))
        self.port, self._nccl_port = reserve_ports(2)
        words = f"""--model-path {checkpoint} --host 127.0.0.1 --port {self.port} --nccl-port {self._nccl_port}
            --api-key {key} --device cpu --attention-backend torch_native --dtype float32 --mem-fraction-static 0.3
            --max-total-tokens 20000 --max-running-requests 32 --disable-overlap-schedule --sleep-on-idle
            --skip-server-warmup"""
        self._command = [sys.executable, "-m", "sglang.launch_server", *words.split(), *more]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client(self) -> EngineClient:
        return EngineClient(f"http://{self.address}", api_key=self.key)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return at once."""
        env = {**os.environ, **DEFAULTS, **CPU_DEFAULTS, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": self._path}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=env, stdout=log, stderr=log, cwd=self.log.parent, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Return when it generates."""
        end = time.monotonic() + READY_S
        while not self.client.is_healthy():
            assert self.is_running, f"it has ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < end, f"not ready:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.5)
        self.client.health_generate(60.0)

    def kill(self) -> None:
        """End it and its schedulers, as a machine that is switched off."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
