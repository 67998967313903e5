"""Every allocation of a trainer process, with the stack that made it: torch's of the GPU, memray's of the host."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

MAX_EVENTS = 1_000_000


class Recorder(Protocol):
    """Records from ``start`` to ``stop``, which writes a file."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def recorder_of(args: Namespace, rank: int) -> Recorder:
    """Return the recorder that ``--memory-recorder`` names.

    Its file is ``<--memory-snapshot-dir>/memory_snapshot_time<seconds>_rank<rank>_<--memory-snapshot-path>``.
    """
    name = f"memory_snapshot_time{time.time():.0f}_rank{rank}_{args.memory_snapshot_path}"
    path = Path(args.memory_snapshot_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return MemrayRecorder(path) if args.memory_recorder == "memray" else TorchRecorder(path)


class TorchRecorder:
    """For https://pytorch.org/memory_viz. Written when the GPU's memory runs out, too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._dump())  # type: ignore[attr-defined]

    def stop(self) -> None:
        import torch

        self._dump()
        torch.cuda.memory._record_memory_history(enabled=None)

    def _dump(self) -> None:
        import torch

        torch.cuda.memory._dump_snapshot(str(self._path))
        logger.info("memory snapshot: %s", self._path)


class MemrayRecorder:
    """For ``memray flamegraph FILE``. memray is no dependency of slime: ``pip install memray``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracker: Any = None

    def start(self) -> None:
        try:
            import memray
        except ImportError as e:
            raise ImportError(
                "--memory-recorder memray needs the package memray on every training host: pip install memray"
            ) from e
        self._tracker = memray.Tracker(str(self._path), native_traces=True)
        self._tracker.__enter__()

    def stop(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.__exit__(None, None, None)
            logger.info("memory record: %s", self._path)
