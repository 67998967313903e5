"""Weights to colocated engines: every trainer rank hands its bucket to the engine rank on the same slot.

On CUDA a bucket is passed as an IPC handle and nothing is copied. Without CUDA its bytes travel inside the request:
shared memory would need a helper process that outlives a killed trainer, and models on such machines are small.
"""

from __future__ import annotations

import base64
import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.servers.drafts import separate_draft
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from slime.utils.distributed_utils import control_group
from slime.weight_sync.buckets import Bucket, iter_buckets
from slime.weight_sync.fanout import WeightSyncError, agree, attempt
from slime.weight_sync.process_group import EngineGroup
from slime.weight_sync.quantized import weights_to_push
from slime.weight_sync.transport import TrainerLayout, WeightSource

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class TensorTransport:
    """Trainer rank ``r`` serves slot ``r``; the first rank of each engine's slots makes the request."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.layout = TrainerLayout.current()
        self._client: EngineClient | None = None
        self._slots: list[int] = []
        self._slots_group: dist.ProcessGroup | None = None
        self._experts: ExpertPlaces | None = None
        self._spare_draft: bool | None = None
        """True: the engine's draft model has a separate checkpoint, whose tensors have the names of the model's."""
        self._beyond: EngineGroup | None = None

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        beyond = []
        for engine, client in zip(engines, clients, strict=True):
            slots = list(range(engine.gpu_offset, engine.gpu_offset + engine.num_gpus))
            if slots[0] >= self.layout.world_size:
                beyond.append((engine, client))
                continue
            if slots[-1] >= self.layout.world_size:
                raise WeightSyncError(
                    f"Engine {engine.url} spans slots {slots[0]}-{slots[-1]}, but the trainer has only "
                    f"{self.layout.world_size}: choose --rollout-num-gpus-per-engine so that no engine lies half on "
                    "the trainer's slots (--actor-num-nodes x --actor-num-gpus-per-node)."
                )
            # new_group is collective: every rank makes every group, also those it is not in.
            group = dist.new_group(slots, backend="gloo")
            if self.layout.rank in slots:
                self._client, self._slots, self._slots_group = client, slots, group
        attempt(self._ask_engine)
        attempt(partial(self._join_beyond, beyond))

    def _ask_engine(self) -> None:
        if self._client is not None:
            info = self._client.server_info()
            self._spare_draft = separate_draft(info) is not None or None
            self._experts = ExpertPlaces.of_engine(info, self.args.num_experts)

    def _join_beyond(self, beyond: list[tuple[EngineInfo, EngineClient]]) -> None:
        if beyond and self.layout.rank == 0:
            self._beyond = EngineGroup(
                [engine for engine, _ in beyond],
                [client for _, client in beyond],
                name="slime",
                backend=self.args.distributed_backend,
                timeout_s=self.args.weight_sync_timeout,
            )

    def prepare(self, source: WeightSource) -> None:
        """Nothing: what is sent is gathered while it is sent."""

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        sent = 0
        error: Exception | None = None  # of this rank: the collectives continue, and the others learn of it at the end
        stream = weights_to_push(source, gather_pp=True)
        for bucket in iter_buckets(stream, self.args.update_weight_buffer_size):
            version = weight_version if bucket.is_last else None
            if self._beyond is not None and error is None:
                try:
                    self._beyond.send(bucket, weight_version=version)
                except Exception as e:  # noqa: BLE001  (raised on every rank, after the stream)
                    error = e
            if self._slots_group is not None:
                mine = self._own(bucket)
                error = self._send_local(mine, version, error)
                sent += mine.nbytes
            elif self._beyond is not None:
                sent += bucket.nbytes
        agree(error)
        if sent and self._slots_group is not None and torch.cuda.is_available():
            torch.cuda.ipc_collect()  # blocks that an engine still held when the bucket was dropped here
        return sent

    def _own(self, bucket: Bucket) -> Bucket:
        """Return the part of ``bucket`` that the engine rank on this rank's slot needs."""
        if self._experts is None:
            return bucket
        place = self._slots.index(self.layout.rank)
        return Bucket(tuple(t for t in bucket.tensors if self._experts.holds(place, t[0])), bucket.is_last)

    def _send_local(self, bucket: Bucket, weight_version: str | None, error: Exception | None) -> Exception | None:
        """Hand over this rank's part; return ``error`` or what goes wrong now. After an error no request is made."""
        flat = bucket.flatten()
        mine = serialize(flat, bucket)
        is_first = self.layout.rank == self._slots[0]
        parts: list[Any] | None = [None] * len(self._slots) if is_first else None
        dist.gather_object(mine, parts, dst=self._slots[0], group=self._slots_group)
        if parts is not None and error is None:
            assert self._client is not None
            try:
                self._client.update_weights_from_tensor(
                    serialized_named_tensors=parts,
                    load_format="flattened_bucket",
                    flush_cache=False,
                    weight_version=weight_version,
                    disable_draft_model=self._spare_draft,
                )
            except Exception as e:  # noqa: BLE001  (raised on every rank, after the stream)
                error = e
        # The engine has mapped this rank's memory until it answered: keep ``flat`` alive until then on every rank.
        dist.barrier(group=self._slots_group)
        del flat
        return error

    def disconnect(self) -> None:
        if self._beyond is not None:
            self._beyond.close()
            self._beyond = None
        if self._slots_group is not None:
            dist.destroy_process_group(self._slots_group)
            self._client, self._slots, self._slots_group = None, [], None
        dist.barrier(group=control_group())


def serialize(flat: torch.Tensor, bucket: Bucket) -> str:
    """Return the base64 text of the request's ``flattened_bucket`` entry for one engine rank.

    The engine reads only attributes of the metadata, and unpickles only classes of modules on its list; plain
    namespaces are on it, so that this process does not have to import sglang.
    """
    metadata = [
        SimpleNamespace(
            name=s.name,
            shape=s.shape,
            dtype=s.dtype,
            start_idx=s.start_idx,
            end_idx=s.end_idx,
            numel=s.end_idx - s.start_idx,
        )
        for s in bucket.slots()
    ]
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer) if flat.is_cuda else pickle.Pickler(buffer)
    pickler.dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclass(frozen=True)
class ExpertPlaces:
    """Experts in the order of their numbers on ``ranks`` engine ranks, ``per_rank`` on each, and again on the next."""

    ranks: int
    per_rank: int

    @classmethod
    def of_engine(cls, info: Mapping[str, Any], num_experts: int | None) -> ExpertPlaces | None:
        """Return the places in the engine with the ``/server_info`` ``info``; None where every rank gets everything.

        That is without expert parallelism, where ranks share an expert, and where the engine moves experts around.
        """
        ep = int(info.get("ep_size") or 1)
        whole = int(info.get("tp_size") or 1) == ep * int(info.get("moe_dp_size") or 1)
        moved = info.get("enable_eplb") or info.get("ep_num_redundant_experts")
        in_order = info.get("init_expert_location", "trivial") == "trivial" and int(info.get("pp_size") or 1) == 1
        if ep == 1 or not whole or moved or not in_order or not num_experts or num_experts % ep:
            return None
        return cls(ep, num_experts // ep)

    def holds(self, rank: int, name: str) -> bool:
        """Return True if the engine's rank needs the tensor with this Hugging Face name."""
        found = _EXPERT.search(name)
        return found is None or int(found[1]) // self.per_rank == rank % self.ranks
