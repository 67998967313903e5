"""The Ray actor around one trainer rank: the Megatron trainer and the weight updater."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from slime.arguments.args import Args
from slime.backends.sglang_utils.environment import MEETING, Scratch
from slime.observability import tracking
from slime.observability.logging_utils import log
from slime.observability.timer import timer
from slime.observability.tracking import rollout_step
from slime.ray.actors import worker
from slime.ray.cluster import own_gpu_index
from slime.ray.remote import reports_errors
from slime.servers.types import EngineInfo
from slime.utils.cores import usable_cores
from slime.utils.network import MEETING_FILE, get_current_node_ip, get_free_port

if TYPE_CHECKING:
    from slime.backends.megatron_utils.train.trainer import MegatronTrainer
    from slime.batching.columns import RolloutShard
    from slime.batching.log_prob_requests import LogProbReply, LogProbShard

logger = logging.getLogger(__name__)

FIRST_MASTER_PORT = 20000


class TrainRayActor:
    """One rank. Methods are collective: the group calls them on every rank at once, in the same order.

    Heavy packages are imported by methods, not by the module: the driver, which names the class, starts without them.
    """

    def __init__(self, args: Args, role: str, rank: int, world_size: int, share_all_cores: bool = False) -> None:
        self.log_path = worker.begin(args, f"{role}_rank{rank}")
        self.args, self.role, self.rank, self.world_size = args, role, rank, world_size
        self._share_all_cores = share_all_cores
        self._updater: Any = None
        self._delta: Any = None
        self._next_rollout = 0
        self._meeting: Scratch | None = None

    def import_packages(self) -> None:
        """Import what ``setup`` needs: torch and Megatron, for several seconds."""
        trainer_class(self.role)

    def master(self, loopback: bool) -> tuple[str, int]:
        """Return where the ranks of the group meet: the address and a free port of this host.

        Ranks of one host (``loopback``) meet at a private file, which is in the place of the address.
        """
        if loopback:
            self._meeting = Scratch(MEETING)
            host = str(self._meeting.path / "ranks")
        else:
            host = get_current_node_ip()
        # Runs that start together on one host search from different ports.
        return host, get_free_port(FIRST_MASTER_PORT + (os.getpid() * 7) % 1000)

    @reports_errors
    def setup(self, master: tuple[str, int], with_ref: bool) -> tuple[int, dict[str, int]]:
        """Build and load the trainer; return its first rollout id and its parallel configuration."""
        host = master[0]
        if host.startswith("/"):
            os.environ[MEETING_FILE] = host
            host = "127.0.0.1"
        os.environ.update(
            MASTER_ADDR=host,
            MASTER_PORT=str(master[1]),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(own_gpu_index()),
        )
        if host == "127.0.0.1":
            # Otherwise gloo resolves the host's name, which may lead to an interface that is down, or nowhere.
            names = [name for _, name in socket.if_nameindex()]
            loopback = next((name for name in names if name in ("lo", "lo0")), names[0])
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        self.trainer = trainer_class(self.role)(self.args, role=self.role, with_ref=with_ref)
        start = self._next_rollout = self.trainer.initialize()
        if self._share_all_cores:
            set_threads_to_share(ray.get_runtime_context().get_node_id())
        return start, dict(self.trainer.parallel_config)

    @reports_errors
    def init(self, master: tuple[str, int], with_ref: bool) -> int:
        """``setup``, then offload with ``--offload-train``; return only the first rollout id."""
        start, _ = self.setup(master, with_ref)
        if self.args.offload_train:
            self.sleep()
        return start

    @reports_errors
    def canary(self, tokens: Sequence[int]) -> list[float] | None:
        """Return the log-probs of ``tokens[1:]`` on the last pipeline stage, None elsewhere."""
        return self.trainer.canary(tokens)

    @reports_errors
    def served_log_probs(self, shards: Sequence[LogProbShard]) -> tuple[int, list[LogProbReply]] | None:
        """Reply to requests of the log-prob server (``slime.batching.log_prob_requests``), a shard per DP rank."""
        return self.trainer.served_log_probs(shards)

    @reports_errors
    def load_weights(self, path: str) -> None:
        """Replace the weights by those of a checkpoint."""
        self.trainer.load_weights(path)

    def layout(self) -> dict[str, int]:
        """Return the parallel configuration of this rank."""
        return dict(self.trainer.parallel_config)

    @reports_errors
    def train(
        self, rollout_id: int, shards: Sequence[Any], external_data: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Train on this rank's shard (``shards`` are boxed references, one per data-parallel rank)."""
        self._next_rollout = rollout_id + 1
        shard: RolloutShard = ray.get(shards[self.trainer.parallel_config["dp_rank"]].inner)
        if self.args.rollout_data_transport == "nixl":
            shard = shard.with_values(np.asarray)
        with self._onloaded():
            return self.trainer.train(rollout_id, shard, external_data=external_data)

    @reports_errors
    def save(self, rollout_id: int, force_sync: bool, export: bool) -> None:
        with self._onloaded():
            self.trainer.save(rollout_id, force_sync=force_sync, export=export)

    @contextmanager
    def _onloaded(self) -> Iterator[None]:
        """Onload an offloaded trainer for the duration of the body: users' drivers need not track which one is."""
        offloaded = self.trainer.offloaded
        if offloaded:
            self.trainer.onload()
        yield
        if offloaded:
            self.trainer.offload()

    @reports_errors
    def update_weights(self, engines: list[EngineInfo], synchronous_loop: bool) -> int:
        """Push the weights to ``engines``; return their new version.

        A push that fails fails on every rank alike, with ``WeightSyncError``; another one may be tried.
        """
        from slime.backends.megatron_utils.state.parallel import gather_from_world
        from slime.weight_sync import create_updater
        from slime.weight_sync.in_place import InPlaceTransport

        with timer("update_weights"):
            if self._updater is None:
                self._updater = create_updater(self.args, self.trainer, synchronous_loop=synchronous_loop)
            self._updater.connect(engines)
            with self.trainer.weights_present():  # an offloaded trainer keeps its weights elsewhere
                version = self._updater.update()
        transport = self._updater.transport
        density = transport.density if isinstance(transport, InPlaceTransport) else None
        self._report_push(sum(gather_from_world(self._updater.bytes_sent)), density)
        self.weights_synced(synchronous_loop)
        return version

    def _report_push(self, wire_bytes: int, density: float | None) -> None:
        if self.rank == 0:
            metrics: dict[str, float] = {"perf/update_weights_wire_bytes": wire_bytes}
            if density is not None:
                metrics["perf/update_weights_density"] = density
            step = {"rollout/step": rollout_step(self.args, self._next_rollout)}
            log(self.args, metrics | step, *step)

    @reports_errors
    def weights_synced(self, synchronous_loop: bool) -> None:
        """Note that the engines have the weights of now; without engines, that they would."""
        self.trainer.weights_synced(synchronous_loop=synchronous_loop)

    @reports_errors
    def publish_weights(self, version: int, engines: list[EngineInfo], confirmed: int | None) -> str:
        """Write the weights as ``version`` for ``--update-weight-transport disk``; return its directory.

        ``confirmed`` is the version that all engines have, None for none that is known.
        """
        from slime.weight_sync.files import DeltaWriter, publish

        if self.args.update_weight_mode == "delta" and self._delta is None:
            self._delta = DeltaWriter(self.args)
        delta = self._delta
        with timer("update_weights"), self.trainer.weights_present():
            directory = publish(self.args, self.trainer, version, engines, delta=delta, confirmed=confirmed)
        if delta is not None:
            self._report_push(delta.wire_bytes, delta.density)
        return str(directory)

    @reports_errors
    def disconnect(self) -> None:
        """Close the channels to the engines."""
        if self._updater is not None:
            self._updater.disconnect()

    @reports_errors
    def sleep(self) -> None:
        if not self.trainer.offloaded:
            self.trainer.offload()

    @reports_errors
    def wake_up(self) -> None:
        if self.trainer.offloaded:
            self.trainer.onload()

    @reports_errors
    def clear_memory(self) -> None:
        self.trainer.clear_memory()

    @reports_errors
    def finish_saving(self) -> None:
        """Complete a checkpoint that is being written."""
        self.trainer.finish_saving()

    @reports_errors
    def finish(self) -> None:
        """Complete what runs in the background (checkpoints being written, records of memory)."""
        self.trainer.finish()

    def ping(self) -> None:
        """Answer, when nothing else is to be done."""

    def process_location(self) -> tuple[str, int]:
        """Return the node and the process id of this rank."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def quit(self) -> None:
        """End this process. The call itself fails with Ray's error of an actor that has ended."""
        ray.actor.exit_actor()

    def drain_records(self) -> list[Any]:
        """Return the metrics logged here since the last call."""
        return tracking.drain()


def set_threads_to_share(node: str) -> None:
    """Give this rank as many threads as its share of the cores of ``node`` among the trainer's ranks (collective)."""
    import torch

    from slime.backends.megatron_utils.state.parallel import gather_from_world

    ranks = gather_from_world(node).count(node)
    torch.set_num_threads(max(1, usable_cores() // ranks))
    logger.info("%d threads: %d cores for %d ranks", torch.get_num_threads(), usable_cores(), ranks)


def trainer_class(role: str) -> type[MegatronTrainer]:
    """Return the trainer class of ``role``. Imports torch and Megatron."""
    if role == "critic":
        from slime.backends.megatron_utils.train.trainer import CriticTrainer

        return CriticTrainer
    from slime.backends.megatron_utils.train.trainer import MegatronTrainer

    return MegatronTrainer
