"""Weight updaters as separate classes, one per transport, for trainers that build theirs by name."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from slime.arguments.args import Args
from slime.servers.types import EngineInfo
from slime.weight_sync import resolve_pause_mode
from slime.weight_sync.distributed import DistributedTransport
from slime.weight_sync.tensor import TensorTransport
from slime.weight_sync.transport import Transport
from slime.weight_sync.updater import WeightUpdater


class _NamedUpdater(WeightUpdater):
    """A ``WeightUpdater`` with the constructor and method names of slime <= 0.3.1.

    Names, quantization and sizes come from ``args`` and the checkpoint, so the keyword arguments are accepted and not
    needed. Engines are ``EngineInfo`` records: what the rollout manager's ``get_updatable_engines`` returns.
    """

    def __init__(self, args: Args, model: Sequence[Any], transport: Transport) -> None:
        pause_mode = resolve_pause_mode(args, synchronous_loop=True)
        super().__init__(args, SimpleNamespace(args=args, model=list(model)), transport, pause_mode=pause_mode)

    def connect_rollout_engines(
        self, rollout_engines: Sequence[EngineInfo], rollout_engine_lock: object = None
    ) -> None:
        """Open the channels to ``rollout_engines``. No lock is needed: only rank 0 controls engines."""
        self.connect(rollout_engines)

    def update_weights(self) -> None:
        """Push the weights under the next version."""
        self.update()


class UpdateWeightFromTensor(_NamedUpdater):
    """To engines on the trainer's own slots."""

    def __init__(self, args: Args, model: Sequence[Any], weights_getter: object = None, **described: object) -> None:
        super().__init__(args, model, TensorTransport(args))


class UpdateWeightFromDistributed(_NamedUpdater):
    """Updates engines on separate slots."""

    def __init__(self, args: Args, model: Sequence[Any], weights_getter: object = None, **described: object) -> None:
        super().__init__(args, model, DistributedTransport(args))
