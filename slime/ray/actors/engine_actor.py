"""The Ray actor of an engine on one node: starts, watches and stops its SGLang process."""

from __future__ import annotations

from typing import Any

from slime.arguments.args import Args
from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.ports import reserve_ports
from slime.ray.actors import worker
from slime.ray.remote import reports_errors
from slime.rollout.hooks.hook import find_hook
from slime.servers.types import EngineInfo
from slime.utils.network import get_current_node_ip, join_address
from slime.weights import versions
from slime.weights.delta import host_copy

RENDEZVOUS_PORTS = 14
"""Of SGLang: its rendezvous, the six sockets after it, and the one 13 above that tells the other nodes its ports."""

STOP_GRACE_S = 1.0
"""At the end of a run an engine has nothing to save; its own shutdown takes seconds."""


class EngineActor:
    """Starts, watches and stops one engine process on the node where Ray put this actor."""

    def __init__(self, args: Args, rank: int, node_rank: int) -> None:
        name = f"engine_{rank}" + (f"_node{node_rank}" if node_rank else "")
        worker.begin(args, f"{name}_actor")
        self._log = worker.log_path(args, name)
        self.args, self.rank, self.node_rank = args, rank, node_rank
        self._process: EngineProcess | None = None

    def rendezvous(self, loopback: bool) -> str:
        """Return an address on this node where the processes of one engine can meet.

        SGLang takes further ports from it for attention with data parallelism: those that follow are free, too.
        """
        return join_address(self._host(loopback), reserve_ports(RENDEZVOUS_PORTS, consecutive=True)[0])

    def free_port(self) -> int:
        """Return a port that is free on this node."""
        return reserve_ports(1)[0]

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
        """Bring ``--update-weight-local-checkpoint-dir`` of this host to a version of the weights; return its path."""
        pull = host_copy.pull if self.args.update_weight_mode == "delta" else versions.pull
        hook = find_hook(self.args, "sglang_custom_pull_weights_pre_read_hook")
        local = self.args.update_weight_local_checkpoint_dir
        assert local is not None, "weights are pulled to --update-weight-local-checkpoint-dir alone"
        return str(pull(directory, local, hook))

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
