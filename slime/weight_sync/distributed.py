"""Weights by broadcast: NCCL on CUDA, gloo on CPU. One group per pipeline stage, the stages one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.weights import iter_hf_weights
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo, weight_group
from slime.utils.distributed_utils import control_group
from slime.weight_sync.buckets import iter_buckets
from slime.weight_sync.fanout import agree, attempt
from slime.weight_sync.process_group import EngineGroup
from slime.weight_sync.quantized import weights_to_push
from slime.weight_sync.transport import TrainerLayout, WeightSource, drain


class DistributedTransport:
    """Each stage's source rank (data, context and tensor rank 0) broadcasts the stage's weights to all engines."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.layout = TrainerLayout.current()
        self._group: EngineGroup | None = None

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        for stage in range(self.layout.pp_size):
            attempt(partial(self._join, stage, engines, clients))

    def _join(self, stage: int, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        if self.layout.is_source and self.layout.pp_rank == stage:
            self._group = EngineGroup(
                engines,
                clients,
                name=weight_group(stage),
                backend=self.args.distributed_backend,
                timeout_s=self.args.weight_sync_timeout,
            )

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        sent = 0
        for stage in range(self.layout.pp_size):
            error = None
            if self.layout.pp_rank == stage:
                is_last_stage = stage == self.layout.pp_size - 1
                sent, error = self._send_stage(source, weight_version if is_last_stage else None)
            agree(error)
        return sent

    def _send_stage(self, source: WeightSource, weight_version: str | None) -> tuple[int, Exception | None]:
        """Return the bytes sent, and what went wrong: the stream is collective, so it is run to its end even then."""
        if self._group is None:
            drain(iter_hf_weights(source.model, source.args))
            return 0, None
        stream = self._weights(source)
        sent = 0
        for bucket in iter_buckets(stream, self.args.update_weight_buffer_size):
            try:
                self._group.send(bucket, weight_version=weight_version if bucket.is_last else None)
            except Exception as error:  # noqa: BLE001  (raised on every rank, after the stream)
                drain(stream)
                return sent, error
            sent += bucket.nbytes
        return sent, None

    def _weights(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        return weights_to_push(source)

    def prepare(self, source: WeightSource) -> None:
        """Nothing: what is sent is gathered while it is sent."""

    def disconnect(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        dist.barrier(group=control_group())
