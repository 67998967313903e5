"""Weights written into the engines' memory (``--update-weight-transport p2p``): the trainers' half.

The engines' half is ``slime_engine_plugin.weights.p2p``. All ranks of a pipeline stage gather its weights, and each
writes a share of them; all ranks of all stages write at the same time. Engines take part in the first step, where they
say where their own loaders put each tensor, and in the last one, where they compare checksums.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights import describe_hf_weights
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from slime.utils.distributed_utils import control_group, listen_on
from slime.weight_sync.fanout import Failure, FanOut, WeightSyncError, attempt, failed, late
from slime.weight_sync.quantized import weights_to_push
from slime.weight_sync.transport import TrainerLayout, WeightSource, drain
from slime.weights.delta.codec import checksum
from slime.weights.p2p import rendezvous
from slime.weights.p2p.agents import HOST, Agent, TransferError, Write, make_agent
from slime.weights.p2p.plan import Piece
from slime.weights.p2p.rendezvous import EngineRank

logger = logging.getLogger(__name__)

GROUP = "slime-p2p"
LEAVING_DEADLINE_S = 60.0

Described = tuple[str, tuple[int, ...], torch.dtype]


class Target(NamedTuple):
    """A rank of an engine, and which of its pieces are made of a tensor of this trainer rank's share."""

    url: str
    peer: str
    engine: EngineRank
    pieces: Mapping[int, Sequence[int]]


class P2PTransport:
    """Every trainer rank writes its share of the weights into every rank of every engine."""

    def __init__(self, args: Args, trainer: WeightSource) -> None:
        self.args = args
        self.trainer = trainer
        self.layout = TrainerLayout.current()
        self._fan_out: FanOut | None = None
        self._store: dist.TCPStore | None = None
        self._share: Sender | None = None

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        weights = [
            (name, shape, str(dtype).removeprefix("torch."))
            for name, shape, dtype in describe_hf_weights(self.trainer.model, self.trainer.args)
        ]
        stages = gather_from_world((self.layout.pp_rank, weights))
        every = dict(stages)
        tensors = [described for stage in sorted(every) for described in every[stage]]
        attempt(lambda: self._open_store(engines, clients, tensors))
        port = gather_from_world(None if self._store is None else self._store.port)[0]
        attempt(lambda: self._join(engines, len(stages), port))
        attempt(lambda: self._find_targets(engines, tensors, stages, port))

    def _open_store(
        self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient], tensors: Sequence[Any]
    ) -> None:
        for engine in engines:
            if not _is_local(engine.url):
                raise WeightSyncError(
                    f"--update-weight-transport p2p: engine {engine.url} is not on {socket.gethostname()}, where the "
                    f"trainer's rank {self.layout.rank} is; that is tested on one host only, leave it out"
                )
        if self.layout.rank == 0:
            self._fan_out = FanOut(clients)
            with listen_on(HOST, 0) as listener:
                port = listener.getsockname()[1]
                self._store = self._new_store(port, master_listen_fd=listener.detach())
            rendezvous.put(self._store, rendezvous.TENSORS, tensors)

    def _new_store(self, port: int, master_listen_fd: int | None = None) -> dist.TCPStore:
        timeout, is_master = timedelta(seconds=self.args.weight_sync_timeout), master_listen_fd is not None
        return dist.TCPStore(
            HOST, port, is_master=is_master, timeout=timeout, wait_for_workers=False, master_listen_fd=master_listen_fd
        )

    def _join(self, engines: Sequence[EngineInfo], trainers: int, port: int) -> None:
        if self._fan_out is None:
            return
        offsets, ranks = {}, 0
        for engine in engines:
            offsets[engine.url] = ranks
            ranks += engine.num_gpus
        self._fan_out.call(
            "let the trainer write into their memory (--update-weight-transport p2p)",
            lambda client: client.init_weights_update_group(
                master_address=HOST,
                master_port=port,
                rank_offset=offsets[client.url],
                world_size=trainers,
                group_name=GROUP,
                backend=rendezvous.BACKEND + self.args.update_weight_p2p_backend,
            ),
            self.args.weight_sync_timeout,
        )

    def _find_targets(
        self, engines: Sequence[EngineInfo], tensors: Sequence[Any], stages: Sequence[Any], port: int
    ) -> None:
        if self._store is None:
            self._store = self._new_store(port)
        mine = share_of(self.layout.rank, stages)
        numbers = {name: number for number, (name, *_) in enumerate(tensors) if name in mine}
        agent = make_agent(self.args.update_weight_p2p_backend)
        self._share = Sender(agent, numbers, self.args.weight_sync_timeout)
        urls = [engine.url for engine in engines for _ in range(engine.num_gpus)]
        for rank, url in enumerate(urls):
            self._share.add(url, rendezvous.get_rank(self._store, rank))
        self._share.allocate(self.args.update_weight_buffer_size)

    def prepare(self, source: WeightSource) -> None:
        """Nothing: what is sent is gathered while it is sent."""

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        sent: list[int] = []
        attempt(lambda: sent.append(self._write(source)))
        attempt(lambda: self._confirm(weight_version))
        return sum(sent)

    def _write(self, source: WeightSource) -> int:
        assert self._share is not None
        assert self._store is not None
        weights = weights_to_push(source)
        try:
            for name, tensor in weights:
                self._share.send(name, tensor)
            self._share.flush()
        finally:
            drain(weights)
        for rank, sums in enumerate(self._share.sums):
            rendezvous.put(self._store, rendezvous.sums_key(self.layout.rank, rank), sums)
        return self._share.finish()

    def _confirm(self, weight_version: str) -> None:
        if self._fan_out is not None:
            self._fan_out.call(
                "find what was written into their memory",
                lambda client: client.update_weights_from_distributed(
                    names=[], dtypes=[], shapes=[], group_name=GROUP, weight_version=weight_version
                ),
                self.args.weight_sync_timeout,
            )

    def disconnect(self) -> None:
        if self._fan_out is not None:
            try:
                self._fan_out.call(
                    "forget the trainer",
                    lambda client: client.destroy_weights_update_group(group_name=GROUP),
                    min(LEAVING_DEADLINE_S, self.args.weight_sync_timeout),
                )
            except WeightSyncError as error:
                logger.warning("%s", error)
            self._fan_out.close()
            self._fan_out = None
        if self._share is not None:
            self._share.agent.close()
            self._share = None
        dist.barrier(group=control_group())
        self._store = None


class Sender:
    """Packs tensors for engine ranks and writes them: ranks that are laid out alike get the same packed bytes.

    Attributes:
        sums: for every engine rank the checksums of what was written in this push, by the number of its piece.
    """

    def __init__(self, agent: Agent, numbers: Mapping[str, int], timeout_s: float) -> None:
        """``numbers``: of the tensors to send, by name; ``timeout_s``: for each buffer."""
        self.agent = agent
        self.numbers = numbers
        self.timeout_s = timeout_s
        self.sums: list[dict[int, str]] = []
        self._targets: list[Target] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._sent = 0
        self._writes: dict[str, list[Write]] = {}
        self._packed: dict[Any, tuple[int, str]] = {}

    def add(self, url: str, engine: EngineRank) -> None:
        """Send to this rank, too."""
        wanted = set(self.numbers.values())
        pieces: dict[int, list[int]] = {}
        for number, piece in enumerate(engine.pieces):
            if piece.tensor in wanted:
                pieces.setdefault(piece.tensor, []).append(number)
        self._targets.append(Target(url, self.agent.connect(engine.agent), engine, pieces))
        self.sums.append({})

    def allocate(self, limit_bytes: int) -> None:
        """Make the buffer, of ``limit_bytes``; less where that is never used, more where a piece is larger."""
        sizes = {
            self._key(piece, target): piece.numel * self._dtype(piece, target).itemsize
            for target in self._targets
            for numbers in target.pieces.values()
            for piece in (target.engine.pieces[number] for number in numbers)
        }
        size = max(max(sizes.values(), default=1), min(limit_bytes, sum(sizes.values())))
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self.agent.register([(self._buffer.data_ptr(), size)], self._buffer)

    def send(self, name: str, tensor: torch.Tensor) -> None:
        """Pack ``tensor`` if it is of this rank's share; write when the buffer is full."""
        number = self.numbers.get(name)
        if number is None:
            return
        self._packed.clear()
        for rank, target in enumerate(self._targets):
            for index in target.pieces.get(number, ()):
                piece = target.engine.pieces[index]
                start, one = self._pack(piece, target, tensor)
                local = start
                address = target.engine.parameters[piece.parameter][0]
                for place, nbytes in piece.runs(self._dtype(piece, target).itemsize):
                    self._writes.setdefault(target.peer, []).append(Write(local, address + place, nbytes))
                    local += nbytes
                self._sent += local - start
                self.sums[rank][index] = one

    def _pack(self, piece: Piece, target: Target, tensor: torch.Tensor) -> tuple[int, str]:
        key = self._key(piece, target)
        if key not in self._packed:
            content = piece.pack(tensor, self._dtype(piece, target))
            if self._used + content.numel() > self._buffer.numel():
                self.flush()
            self._buffer[self._used : self._used + content.numel()] = content
            address = self._buffer.data_ptr() + self._used
            self._used += content.numel()
            self._packed[key] = (address, checksum(content.numpy(), rendezvous.CHECKSUM))
        return self._packed[key]

    def flush(self) -> None:
        """Write what is packed to all engines at once."""
        writes, self._writes, self._used = self._writes, {}, 0
        self._packed.clear()
        if not writes:
            return
        try:
            self.agent.write(writes, self.timeout_s)
        except TransferError as error:
            urls = {target.peer: target.url for target in self._targets}
            reasons = [
                late(urls[peer], self.timeout_s) if reason is None else Failure(urls[peer], reason)
                for peer, reason in error.reasons.items()
            ]
            raise failed("write weights into the memory", reasons, len(set(urls.values()))) from error

    def finish(self) -> int:
        """Begin a new push; return the bytes that were written in this one."""
        sent, self._sent = self._sent, 0
        self.sums = [{} for _ in self.sums]
        return sent

    @staticmethod
    def _dtype(piece: Piece, target: Target) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, target.engine.parameters[piece.parameter][1])
        return dtype

    @staticmethod
    def _key(piece: Piece, target: Target) -> Any:
        return piece.tensor, piece.shape, piece.source, piece.source_start, target.engine.parameters[piece.parameter][1]


def share_of(rank: int, stages: Sequence[tuple[int, Sequence[tuple[str, Sequence[int], str]]]]) -> frozenset[str]:
    """Return the tensors that trainer rank ``rank`` writes: each goes to the rank of its stage that has least so far.

    ``stages``: of every trainer rank its pipeline stage and all tensors of that, ``(name, shape, dtype)``.
    """
    stage, described = stages[rank]
    load = {member: 0 for member, (of, _) in enumerate(stages) if of == stage}
    mine = set()
    for name, shape, _ in described:
        least = min(load, key=lambda member: load[member])
        load[least] += torch.Size(shape).numel()
        if least == rank:
            mine.add(name)
    return frozenset(mine)


def _is_local(url: str) -> bool:
    """Return True if the host of ``url`` is this one."""
    host = urlparse(url).hostname or ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
