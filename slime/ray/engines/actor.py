"""The Ray actor around one node of one SGLang engine. The engine is a child process and ends with the actor."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.sglang_utils import version_files
from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.ports import reserve_ports
from slime.ray import worker
from slime.ray.errors import reports_errors
from slime.servers.types import EngineInfo
from slime.utils.network import get_current_node_ip

STOP_GRACE_S = 1.0
"""At the end of a run an engine has nothing to save; left to itself it takes seconds to say goodbye."""


class EngineActor:
    """Starts, watches and stops one engine process on the node where Ray put this actor."""

    def __init__(self, args: Namespace, rank: int, node_rank: int) -> None:
        name = f"engine_{rank}" + (f"_node{node_rank}" if node_rank else "")
        worker.begin(args, f"{name}_actor")
        self._log = worker.log_path(args, name)
        self.args, self.rank, self.node_rank = args, rank, node_rank
        self._process: EngineProcess | None = None

    def rendezvous(self, loopback: bool) -> str:
        """Return an address on this node where the processes of one engine can meet."""
        return f"{self._host(loopback)}:{reserve_ports(1)[0]}"

    @reports_errors
    def start(self, loopback: bool, **placement: Any) -> None:
        """Start the engine's process; see ``EngineProcess`` for ``placement``."""
        self._process = EngineProcess(
            self.args,
            rank=self.rank,
            node_rank=self.node_rank,
            host=self._host(loopback),
            log_path=self._log,
            **placement,
        )
        self._process.start()

    @reports_errors
    def wait_ready(self) -> EngineInfo:
        """Return where the engine is reached, once it generates. Other nodes of an engine only have to stay alive."""
        process = self._running()
        if self.node_rank == 0:
            process.wait_ready()
        return process.info

    @reports_errors
    def pull_weights(self, directory: str) -> str:
        """Copy a version of the weights to ``--update-weight-local-checkpoint-dir`` of this host; return the copy."""
        return str(version_files.pull(directory, self.args.update_weight_local_checkpoint_dir))

    def poll(self) -> str | None:
        """Return None while the engine runs, else what ended it with its last log lines."""
        return self._running().poll()

    def last_lines(self) -> list[str]:
        return self._running().last_lines()

    @reports_errors
    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(STOP_GRACE_S)

    def _running(self) -> EngineProcess:
        if self._process is None:
            raise RuntimeError(f"engine {self.rank} has not been started")
        return self._process

    def _host(self, loopback: bool) -> str:
        return "127.0.0.1" if loopback else get_current_node_ip()
