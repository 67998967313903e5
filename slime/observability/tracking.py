"""The way of metrics to files and trackers: one writer per run, any number of processes that measure.

Invariant: only the primary process (the driver) touches files and trackers. Every other process buffers its records;
its owner fetches them with :func:`drain` and the driver hands them to :func:`ingest`; what has not been fetched by the
end of the run is asked for then (:meth:`Tracker.add_source`). A metric is therefore written
once, by one process, in the order in which the driver saw it, and a run needs no shared tracker session.
"""

from __future__ import annotations

import logging
import math
import numbers
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)

BUFFER_LIMIT = 200_000
"""Records a process without a writer keeps until it is drained; the oldest are dropped beyond this."""

STEP_AXES: dict[str, tuple[str, ...]] = {
    "train/step": ("train/",),
    "rollout/step": ("rollout/", "multi_turn/", "passrate/", "perf/"),
    "eval/step": ("eval/",),
}
"""Step key of a plot -> prefixes of the metrics drawn over it."""


class Record(TypedDict):
    """One measurement: metric ``name`` had ``value`` at ``step`` of the axis ``step_key``; ``time`` is a Unix time."""

    step_key: str
    step: int
    name: str
    value: Any
    time: float


class Writer(Protocol):
    """A destination of metrics."""

    def write(self, step_key: str, step: int, metrics: Mapping[str, Any], timestamp: float) -> None:
        """Store ``metrics`` (the step key is not among them) at ``step``."""

    def close(self) -> None:
        """Flush and release the destination."""


class Tracker:
    """Fans records out to writers, or buffers them where there is no writer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._writers: list[Writer] | None = None
        self._sources: list[Callable[[], list[Record]]] = []
        self._buffer: deque[Record] = deque(maxlen=BUFFER_LIMIT)
        self._dropped = 0
        self._failing: set[str] = set()

    @property
    def is_primary(self) -> bool:
        """True if this process writes."""
        return self._writers is not None

    def open(self, writers: list[Writer]) -> None:
        """Become the primary; all that was buffered before is written now."""
        with self._lock:
            self._writers = writers
            self.ingest(self.drain())

    def add_source(self, drain: Callable[[], list[Record]]) -> None:
        """Let ``close`` ask ``drain`` for what another process has measured and not handed over yet."""
        with self._lock:
            self._sources.append(drain)

    def close(self, *, complete: bool = True) -> None:
        """Close all writers; the process buffers again afterwards. With ``complete`` ask the sources before.

        A source or a writer that fails keeps no writer open.
        """
        with self._lock:
            sources, self._sources = self._sources, []
        for source in sources if complete and self.is_primary else ():  # they wait: without the lock
            try:
                self.ingest(source())
            except Exception:
                logger.exception("the last metrics of another process are lost")
        with self._lock:
            writers, self._writers = self._writers or [], None
            for writer in writers:
                try:
                    writer.close()
                except Exception:
                    logger.exception("closing %s failed", type(writer).__name__)

    def add(self, records: Iterable[Record]) -> None:
        """Write ``records``, or keep them for :meth:`drain` when this process has no writer."""
        with self._lock:
            if self._writers is not None:
                self._write(records)
                return
            for record in records:
                if len(self._buffer) == self._buffer.maxlen:
                    if self._dropped == 0:
                        logger.warning("more than %d metrics wait in this process: the oldest are lost", BUFFER_LIMIT)
                    self._dropped += 1
                self._buffer.append(record)

    def drain(self) -> list[Record]:
        """Return the buffered records and forget them."""
        with self._lock:
            records = list(self._buffer)
            self._buffer.clear()
            return records

    def ingest(self, records: Iterable[Record]) -> None:
        """Take over the records that another process drained."""
        self.add(records)

    def _write(self, records: Iterable[Record]) -> None:
        groups: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}
        for record in records:
            metrics, _ = groups.setdefault((record["step_key"], record["step"]), ({}, record["time"]))
            metrics[record["name"]] = record["value"]
        for (step_key, step), (metrics, timestamp) in groups.items():
            for writer in self._writers or ():
                try:
                    writer.write(step_key, step, metrics, timestamp)
                except Exception as e:  # noqa: BLE001  (what a tracker meets with must not end the run)
                    self._complain(writer, e)
                else:
                    self._failing.discard(type(writer).__name__)

    def _complain(self, writer: Writer, error: Exception) -> None:
        """Say once that a writer fails, until it works again."""
        name = type(writer).__name__
        if name not in self._failing:
            self._failing.add(name)
            logger.warning("%s cannot write metrics, and the run continues: %s: %s", name, type(error).__name__, error)


def rollout_step(args: Args, rollout_id: int) -> int:
    """Return the place on the ``rollout/step`` and ``eval/step`` axes: the rollout's id.

    With ``--wandb-always-use-train-step``: the optimizer steps that the samples of earlier rollouts were meant for.
    """
    if not args.wandb_always_use_train_step:
        return rollout_id
    return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


_tracker = Tracker()


def get_tracker() -> Tracker:
    """Return the tracker of this process."""
    return _tracker


def drain() -> list[Record]:
    """Return the metrics logged in this process since the last call (empty in the primary process)."""
    return _tracker.drain()


def ingest(records: Iterable[Record]) -> None:
    """Write metrics that another process drained. In a process that is not the primary they are buffered again."""
    _tracker.ingest(records)


def to_records(metrics: Mapping[str, Any], step_key: str) -> list[Record]:
    """Split ``metrics`` into records at the step that they hold under ``step_key``.

    Scalars of torch and numpy become plain numbers. Raises KeyError when the step is missing.
    """
    if step_key not in metrics:
        raise KeyError(
            f"metrics logged over {step_key!r} must contain that key (the step); they hold: {', '.join(metrics)}"
        )
    step, now = int(metrics[step_key]), time.time()
    return [
        {"step_key": step_key, "step": step, "name": name, "value": plain(value), "time": now}
        for name, value in metrics.items()
        if name != step_key
    ]


def plain(value: Any) -> Any:
    """Turn a 0-d tensor or array into a Python number; leave anything else as it is."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None:
        size = value.size() if callable(value.size) else value.size
        if (math.prod(size) if isinstance(size, Iterable) else size) == 1:
            return item()
    return value


def is_scalar(value: object) -> bool:
    """Return True if ``value`` is a number that can be drawn as a curve."""
    return isinstance(value, numbers.Real)


def tensorboard_dir(args: Args) -> str:
    """Return ``$TENSORBOARD_DIR`` or ``tensorboard_log/<project>/<experiment>`` (default: a timestamp)."""
    if directory := os.environ.get("TENSORBOARD_DIR"):
        return directory
    project = args.tb_project_name
    if not project:
        raise ValueError(
            "--use-tensorboard needs to know where to write: give --tb-project-name NAME (writes to "
            "tensorboard_log/NAME/...) or set the environment variable TENSORBOARD_DIR"
        )
    experiment = args.tb_experiment_name or time.strftime("%Y%m%d-%H%M%S")
    return os.path.join("tensorboard_log", project, experiment)
