"""A process group between one trainer rank (rank 0) and the ranks of several engines.

The engines join through their own HTTP call (``/init_weights_update_group``); both sides meet at a store that the
trainer opens: a private file on one host, a TCP store otherwise. SGLang makes its side of the group as
``init_process_group`` of ``slime.utils.distributed_utils`` does: the store prefix is the group's name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from slime.backends.sglang_utils.environment import MEETING, Scratch
from slime.backends.sglang_utils.ports import reserve_ports
from slime.servers.auth import is_loopback
from slime.servers.engine_client import EngineClient
from slime.servers.http_utils import get_host_info
from slime.servers.types import EngineInfo
from slime.utils.distributed_utils import init_process_group
from slime.utils.network import join_address
from slime.utils.structured_error import data_of
from slime.weight_sync.buckets import Bucket
from slime.weight_sync.fanout import FanOut, WeightSyncError, failed, late

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LEAVING_DEADLINE_S = 60.0
# How often a broadcast in progress is checked against failed engine calls. Small against any transfer worth timing.
_POLL_S = 0.001


class EngineGroup:
    """Rank 0 of a process group whose other ranks are the ranks of ``engines``, in engine order."""

    def __init__(
        self,
        engines: Sequence[EngineInfo],
        clients: Sequence[EngineClient],
        *,
        name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._fanout = FanOut(clients)
        self._group: Any = None
        self._backend = backend
        self._connected = backend != "nccl"
        """NCCL makes its communicator in the first broadcast, which waits in there for all engines."""
        self._failed = False
        self._scratch: Scratch | None = None
        self._join(engines, backend)

    def _join(self, engines: Sequence[EngineInfo], backend: str) -> None:
        address, port, init_method = self._meeting(engines)
        world_size = 1 + sum(engine.num_gpus for engine in engines)
        offsets, offset = {}, 1
        for engine in engines:
            offsets[engine.url] = offset
            offset += engine.num_gpus

        def join(client: EngineClient) -> None:
            client.init_weights_update_group(
                master_address=address,
                master_port=port,
                rank_offset=offsets[client.url],
                world_size=world_size,
                group_name=self.name,
                backend=backend,
            )

        futures = self._fanout.start(join)
        self._group = init_process_group(
            backend,
            init_method,
            timedelta(seconds=self.timeout_s),
            world_size=world_size,
            rank=0,
            group_name=self.name,
        )
        self._fanout.wait(futures, f"join the process group {self.name!r}", self.timeout_s)

    def _meeting(self, engines: Sequence[EngineInfo]) -> tuple[str, int, str]:
        """Return address and port for the engines, and the same as torch's ``init_method``.

        The run's own engines of this host meet at a file: the address is its path
        (``slime_engine_plugin.server.rendezvous``).
        """
        host = _rendezvous_address(engines)
        if host == LOOPBACK and all(engine.life == 0 for engine in engines):
            self._scratch = Scratch(MEETING)
            path = str(self._scratch.path / "store")
            return path, 0, f"file://{path}"
        port = reserve_ports(1)[0]
        return host, port, f"tcp://{join_address(host, port)}"

    def send(self, bucket: Bucket, *, weight_version: str | None, as_dtype: str | None = None) -> None:
        """Announce ``bucket`` to every engine and broadcast its bytes.

        Args:
            bucket: the tensors, on the device of the group's backend.
            weight_version: the number that the engines report from now on; None leaves it.
            as_dtype: announced to the engines instead of the tensors' types (``weights.delta.message.DTYPE``).
        """

        def announce(client: EngineClient) -> None:
            client.update_weights_from_distributed(
                names=bucket.names,
                dtypes=[as_dtype or str(t.dtype).removeprefix("torch.") for _, t in bucket.tensors],
                shapes=[list(t.shape) for _, t in bucket.tensors],
                group_name=self.name,
                load_format="flattened_bucket",
                flush_cache=False,
                weight_version=weight_version,
            )

        what = f"load a bucket of {len(bucket.tensors)} tensors ({bucket.nbytes} bytes, first {bucket.names[0]!r})"
        futures = self._fanout.start(announce)
        flat = bucket.flatten()
        self._failed = True  # until all has gone well
        if self._connected:
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        else:
            first = _InThread(self._broadcast_first, flat)
            self._await(first.is_completed, futures, what)
            work = first.result()
            self._connected = True
        self._await(work.is_completed, futures, what)
        work.wait()
        self._failed = False  # what engines answer now is no matter of the group
        self._fanout.wait(futures, what, self.timeout_s)

    def _broadcast_first(self, flat: torch.Tensor) -> Any:
        if flat.is_cuda:
            torch.cuda.set_device(flat.device)  # of this thread
        return dist.broadcast(flat, src=0, group=self._group, async_op=True)

    def _await(self, is_completed: Callable[[], bool], futures: list[Future[Any]], what: str) -> None:
        """Wait for the broadcast, but no longer than until the first engine refuses to join it."""
        deadline = time.monotonic() + self.timeout_s
        while not is_completed():
            errors = [future.exception() for future in futures if future.done()]
            # One that has received the bytes and refused them takes part in the broadcast to the end.
            for error in (error for error in errors if error and not data_of(error).get("refused")):
                message = f"Weight sync could not {what}: {type(error).__name__}: {error}"
                raise WeightSyncError(message, data_of(error)) from error
            if time.monotonic() > deadline:
                clients = self._fanout.clients
                missing = [c.url for c, future in zip(clients, futures, strict=True) if not future.done()]
                if 0 < len(missing) < len(clients):  # else it is unknown who holds it up
                    raise failed(what, [late(url, self.timeout_s) for url in missing], len(clients))
                raise WeightSyncError(
                    f"Weight sync: the broadcast to {what} in group {self.name!r} did not end within "
                    f"{self.timeout_s:.0f} s (--weight-sync-timeout); an engine may have died, see the engines' logs."
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave the group. An engine that has exited is not an error: it has left the group already.

        After a broadcast that did not end, NCCL is not asked to finish what will never finish: the group is aborted.
        """
        if self._group is None:
            return

        def leave(client: EngineClient) -> None:
            client.destroy_weights_update_group(group_name=self.name)

        futures = self._fanout.start(leave)
        if self._failed and self._backend == "nccl":
            _abort_process_group(self._group)
        else:
            dist.destroy_process_group(self._group)
        self._group = None
        try:
            self._fanout.wait(
                futures, f"leave the process group {self.name!r}", min(LEAVING_DEADLINE_S, self.timeout_s)
            )
        except WeightSyncError as error:
            logger.warning("%s", error)
        self._fanout.close()
        # Not before: an engine that leaves uses the file, and looks half an hour for one that is gone at that moment.
        if self._scratch is not None:
            self._scratch.remove()


class _InThread:
    """One call in a separate thread, which may never return and then ends with the process."""

    def __init__(self, call: Callable[..., Any], *args: object) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(call(*args))
            except BaseException as e:  # noqa: BLE001  (raised by result)
                self._future.set_exception(e)

        threading.Thread(target=run, name="first-broadcast", daemon=True).start()

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        return self._future.result()


def _rendezvous_address(engines: Sequence[EngineInfo]) -> str:
    hosts = {urlparse(engine.url).hostname for engine in engines}
    if all(is_loopback(host or "") for host in hosts):
        return LOOPBACK
    return get_host_info()[1].strip("[]")
