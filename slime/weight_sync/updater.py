"""One push of weights, step by step: pause, flush, send, verify, continue."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from slime.arguments.args import Args
from slime.servers.engine_client import EngineClient, PauseMode
from slime.servers.types import EngineInfo
from slime.weight_sync import steps
from slime.weight_sync.fanout import FanOut, WeightSyncError, attempt
from slime.weight_sync.transport import Transport, WeightSource


class WeightUpdater:
    """One per trainer rank; every method is collective. Only rank 0 controls the engines.

    ``pause_mode``: of ``resolve_pause_mode``; None: the engines keep generating during a push.

    Attributes:
        version: number of the last push that every engine confirmed.
        bytes_sent: bytes this rank sent in the last push.
    """

    def __init__(
        self, args: Args, trainer: WeightSource, transport: Transport, *, pause_mode: PauseMode | None
    ) -> None:
        self.args = args
        self.trainer = trainer
        self.transport = transport
        self.pause_mode = pause_mode
        # No flag: drivers of users may set it to continue the count of an earlier run.
        self.version = int(getattr(args, "update_weight_start_version", 0) or 0)
        self.bytes_sent = 0
        self._engines: list[EngineInfo] = []
        self._control: FanOut | None = None
        self._connected = False

    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """(Re)build the channels to ``engines``; a no-op when they are the ones connected already.

        Raises WeightSyncError, on every rank, when an engine cannot be reached; another attempt may follow.
        """
        if list(engines) == self._engines:
            return
        self.disconnect()
        timeout = self.args.weight_sync_timeout
        clients = [
            EngineClient(e.url, api_key=e.api_key, admin_api_key=e.admin_api_key, timeout=timeout) for e in engines
        ]
        if dist.get_rank() == 0:
            self._control = FanOut(clients)
        # A process group waits for all of its members: check first that no engine has died.
        attempt(self._health_check)
        self._connected = True
        self.transport.connect(engines, clients)
        self._engines = list(engines)

    def disconnect(self) -> None:
        """Close the channels, those of a connection or push that failed too."""
        if self._connected:
            self.transport.disconnect()
            self._connected = False
        if self._control is not None:
            self._control.close()
            self._control = None
        self._engines = []

    def update(self) -> int:
        """Push the trainer's weights to every engine and return the new version.

        Raises:
            WeightSyncError: on every rank, when an engine refused, died, was late, or reports another version
                afterwards. The engines stay paused then: what they would generate has no known version. The next
                ``connect`` builds new channels.
        """
        if not self._engines:
            raise WeightSyncError("Weight sync has no engines: call connect() with the rollout engines first.")
        version = self.version + 1
        try:
            self.transport.prepare(self.trainer)
            attempt(self._pause_and_flush)
            self.bytes_sent = self.transport.send(self.trainer, weight_version=str(version))
            attempt(lambda: self._verify_and_continue(version))
        except WeightSyncError:
            self._engines = []
            raise
        self.version = version
        return version

    def _health_check(self) -> None:
        if self._control is not None:
            steps.health_check(self._control, self.args.weight_sync_timeout)

    def _pause_and_flush(self) -> None:
        if self._control is not None and self.pause_mode is not None:
            steps.pause_and_flush(self._control, self.pause_mode, self.args.weight_sync_timeout)

    def _verify_and_continue(self, version: int) -> None:
        if self._control is None:
            return
        steps.verify(self._control, version, self.args.weight_sync_timeout)
        if self.pause_mode is not None:
            steps.resume(self._control, self.args.weight_sync_timeout)
