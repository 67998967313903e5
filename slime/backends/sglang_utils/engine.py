"""One node of one SGLang engine, as a child process of the caller."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.arguments.args import Args
from slime.arguments.rules.lora import takes_adapters
from slime.backends.sglang_utils.engine_forks import fork_server_of_engines
from slime.backends.sglang_utils.environment import Scratch, engine_environment, make_private
from slime.backends.sglang_utils.errors import EngineStartError, with_last_lines
from slime.backends.sglang_utils.ports import looks_like_port_conflict, reserve_ports
from slime.backends.sglang_utils.server_args import (
    EngineSpec,
    build_server_args,
    check_transport,
    has_no_key,
    secret_fields,
)
from slime.servers.auth import is_loopback
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.servers.types import EngineInfo
from slime.utils import shared_memory
from slime.utils.network import join_address
from slime.utils.process_guard import GuardedProcess, spawn

logger = logging.getLogger(__name__)

LAST_LINES = 40
PORT_ATTEMPTS = 3
_POLL_S = 0.25


class EngineProcess:
    """Start, watch and stop an engine. Its processes end when this process ends, by SIGKILL too.

    ``port``, ``nccl_port`` and a prefill engine's ``bootstrap_port`` left at None are chosen at the start, and chosen
    again when another process takes one of them before the engine binds it: ``info`` is final once :meth:`wait_ready`
    has returned. For the other
    arguments see ``server_args.EngineSpec``. The log is appended to, so that a restarted engine keeps its history.
    """

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        host: str,
        log_path: str | Path,
        port: int | None = None,
        nccl_port: int | None = None,
        dist_init_addr: str | None = None,
        nnodes: int = 1,
        node_rank: int = 0,
        base_gpu_id: int = 0,
        gpu_offset: int = 0,
        num_gpus: int | None = None,
        name: str | None = None,
        worker_type: str = "regular",
        bootstrap_port: int | None = None,
        model_path: str | None = None,
        update_weights: bool = True,
        offload: bool | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args
        self.name = (name or f"engine {rank}") + (f" (node {node_rank} of {nnodes})" if nnodes > 1 else "")
        self.log_path = Path(log_path)
        self.gpu_offset = gpu_offset
        self._spec = EngineSpec(
            rank=rank,
            host=host,
            port=port or 0,
            nccl_port=nccl_port or 0,
            num_gpus=int(args.rollout_num_gpus_per_engine if num_gpus is None else num_gpus),
            model_path=str(model_path or args.hf_checkpoint),
            base_gpu_id=base_gpu_id,
            dist_init_addr=dist_init_addr,
            nnodes=nnodes,
            node_rank=node_rank,
            worker_type=worker_type,
            bootstrap_port=bootstrap_port,
            update_weights=update_weights,
            offload=offload,
            overrides=overrides,
        )
        self._chooses_ports = port is None
        self._chooses_bootstrap_port = worker_type == "prefill" and bootstrap_port is None
        self._process: GuardedProcess | None = None
        self._scratch: Scratch | None = None
        self._started_at = 0.0

    @property
    def info(self) -> EngineInfo:
        """Address, keys and slots of the engine. Known from :meth:`start` on."""
        spec = self._spec
        return EngineInfo(
            url=f"http://{join_address(spec.host, spec.port)}",
            num_gpus=spec.num_gpus,
            gpu_offset=self.gpu_offset,
            worker_type=spec.worker_type,
            rank=spec.rank,
            api_key=self.args.sglang_api_key,
            admin_api_key=self.args.sglang_admin_api_key,
            bootstrap_port=spec.bootstrap_port,
        )

    @property
    def pid(self) -> int | None:
        """Process id of the HTTP server, None before the start."""
        return self._process.pid if self._process else None

    def client(self, timeout: float = 600.0) -> EngineClient:
        """Return a client for this engine."""
        return EngineClient.of(self.info, timeout)

    def start(self) -> None:
        """Start the server process and return at once. Raises EngineStartError for a package that is missing."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"{self.name} runs already (pid {self.pid})")
        check_transport(self.args, self._spec)
        if self._chooses_ports:
            port, nccl_port = reserve_ports(2)
            self._spec = replace(self._spec, port=port, nccl_port=nccl_port)
        elif not self._spec.nccl_port:
            self._spec = replace(self._spec, nccl_port=reserve_ports(1)[0])
        if self._chooses_bootstrap_port:
            self._spec = replace(self._spec, bootstrap_port=reserve_ports(1)[0])
        command = build_server_args(self.args, self._spec)
        self._scratch = Scratch()
        secrets = secret_fields(self.args)
        if has_no_key(self.args):
            what = f"{self.name} answers whoever reaches it: SGLang knows no keys with --sglang-tokenizer-worker-num"
            if not is_loopback(self._spec.host):
                raise EngineStartError(f"{what}, and other hosts reach {self._spec.host}; leave that flag out")
            logger.warning("%s", what)
        if secrets:
            command += ["--config", str(self._scratch.write_secrets(secrets))]
            make_private(self.log_path)  # SGLang logs its arguments
        env = engine_environment(
            device_type=self.args.device_type,
            tp_size=self._spec.num_gpus,
            scratch=self._scratch.path,
            takes_adapters=takes_adapters(self.args) and self._spec.update_weights,
            # Experts that talk through NIXL want a TCP store of SGLang's own.
            meets_at_file=self._spec.nnodes == 1 and self.args.sglang_moe_a2a_backend != "nixl",
        )
        # Prefill and decode engines load other parts of the plug-in.
        may_fork = self.args.device_type == "cpu" and self._spec.worker_type == "regular"
        forks = fork_server_of_engines() if may_fork else None
        self._process = spawn(command, env, self.log_path, self.name, fork_server=forks)
        self._started_at = time.monotonic()
        logger.info("%s: pid %d, %s, log %s", self.name, self._process.pid, self.info.url, self.log_path)
        logger.debug("%s: %s", self.name, shlex.join(command))

    def wait_ready(self, deadline_s: float | None = None) -> None:
        """Return when the engine has generated a token.

        Raises:
            EngineStartError: it exited, or is not ready ``deadline_s`` seconds after this call (default
                ``args.engine_ready_timeout``). The message holds its last log lines, the data says whether they are
                about a port that was taken; the process has been ended.
        """
        seconds = float(self.args.engine_ready_timeout if deadline_s is None else deadline_s)
        deadline = time.monotonic() + seconds
        attempts = 1
        client = self.client(timeout=10.0)
        while True:
            ended = self.poll()
            if ended is not None:
                alone = self._chooses_ports and self._spec.nnodes == 1  # other nodes would wait for what has ended
                if alone and attempts < PORT_ATTEMPTS and looks_like_port_conflict(self.last_lines(300)):
                    logger.warning("%s: another process took port %d; starting again", self.name, self._spec.port)
                    attempts += 1
                    self.stop()
                    self.start()
                    client = self.client(timeout=10.0)
                    continue
                raise self._start_error(ended if shared_memory.hint(ended) else f"{ended}\n{_ADVICE}")
            if client.is_healthy(timeout=5.0) and self._generates(client, deadline) and self._is_ours(client):
                logger.info("%s: ready after %.1f s", self.name, time.monotonic() - self._started_at)
                if self._scratch is not None:
                    self._scratch.remove_secrets()
                return
            if time.monotonic() > deadline:
                message = with_last_lines(
                    f"{self.name} at {self.info.url} is not ready after {seconds:g} s (--engine-ready-timeout).",
                    self.log_path,
                    self.last_lines(),
                )
                raise self._start_error(f"{message}\n{_ADVICE}")
            time.sleep(_POLL_S)

    def _start_error(self, message: str) -> EngineStartError:
        """End the process and return the error."""
        taken = looks_like_port_conflict(self.last_lines())
        self.stop()
        return EngineStartError(message, {"port_taken": taken})

    def poll(self) -> str | None:
        """Return None while the engine runs, else what ended it, with its last log lines."""
        if self._process is None:
            return f"{self.name} has not been started."
        code = self._process.poll()
        if code is None:
            return None
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        said = with_last_lines(
            f"{self.name} (pid {self.pid}, {self.info.url}) {how}.", self.log_path, self.last_lines()
        )
        return said + shared_memory.hint(said)

    def last_lines(self, n: int = LAST_LINES) -> list[str]:
        """Return the last ``n`` lines that this engine has logged since its last start."""
        return self._process.last_lines(n) if self._process else []

    def stop(self, grace_s: float = 1.0) -> None:
        """End the engine and everything it started, and remove what it left; nothing happens when it is not running.

        SGLang has nothing to finish, and its own reaction to SIGTERM takes six seconds: the grace is short.
        """
        if self._process is not None:
            self._process.stop(grace_s)
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _generates(self, client: EngineClient, deadline: float) -> bool:
        try:
            client.health_generate(timeout=max(5.0, min(30.0, deadline - time.monotonic())))
        except EngineError:
            return False
        return True

    def _is_ours(self, client: EngineClient) -> bool:
        """False when the server that answers at our port is another: ours is then about to fail to bind it."""
        if self._spec.node_rank > 0 or self._spec.worker_type == "encoder":
            return True  # these have no /server_info
        try:
            return int(client.server_info()["nccl_port"]) == self._spec.nccl_port
        except (EngineError, KeyError, TypeError, ValueError):
            return False


_ADVICE = (
    "Look for the first error in the log. Frequent causes: a wrong --hf-checkpoint or model_path, too little memory "
    "(--sglang-mem-fraction-static, --sglang-max-total-tokens), an --sglang-* option that this device does not support."
)
