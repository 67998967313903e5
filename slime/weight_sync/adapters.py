"""Send only adapters to the engines (``--lora-sync adapter``), which keep generating meanwhile."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.lora.peft import iter_adapters, peft_config, target_names
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from slime.utils.distributed_utils import control_group
from slime.weight_sync.buckets import Bucket
from slime.weight_sync.fanout import FanOut, attempt
from slime.weight_sync.tensor import serialize
from slime.weight_sync.transport import WeightSource


class AdapterTransport:
    """Rank 0 loads the adapters of all ranks into every engine under a new name: ``policy@12-1f3a9c``.

    The name is used once: what a push that failed has left on some engines is none of the next one's business. Requests
    get the adapter when the engine is sent its version (``engine_plugin``), which is after all engines have loaded it.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self._engines: list[tuple[EngineInfo, EngineClient]] = []
        self._fan_out: FanOut | None = None

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        if dist.get_rank() == 0:
            self._fan_out = FanOut(clients)
            self._engines = list(zip(engines, clients, strict=True))

    def prepare(self, source: WeightSource) -> None:
        """Nothing: what is sent is gathered while it is sent."""

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        config = peft_config(source.args, target_names(source.model))
        tensors = [(name, tensor.detach().cpu()) for name, tensor in iter_adapters(source.model, source.args)]
        bucket = Bucket(tuple(tensors), is_last=True)
        attempt(partial(self._load, bucket, config, weight_version))
        return bucket.nbytes if self._fan_out is not None else 0

    def _load(self, bucket: Bucket, config: dict[str, Any], version: str) -> None:
        if self._fan_out is None:
            return
        name = f"policy@{version}-{uuid.uuid4().hex[:8]}"
        payload = serialize(bucket.flatten(), bucket)
        ranks = {client.url: engine.num_gpus for engine, client in self._engines}
        timeout = self.args.weight_sync_timeout
        self._fan_out.call(
            f"load the adapter {name}",
            lambda client: client.load_lora_adapter_from_tensors(
                lora_name=name, config_dict=config, serialized_named_tensors=[payload] * ranks[client.url]
            ),
            timeout,
        )
        self._fan_out.call(
            f"take weight version {version}", lambda client: client.update_weight_version(version), timeout
        )

    def disconnect(self) -> None:
        if self._fan_out is not None:
            self._fan_out.close()
            self._fan_out, self._engines = None, []
        dist.barrier(group=control_group())
