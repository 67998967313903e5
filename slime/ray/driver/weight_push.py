"""A push of weights, on the driver: the order of what trainers, engines and files do in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime.arguments.args import Args
from slime.ray.remote import RemoteFailure
from slime.servers.types import EngineInfo
from slime.weights import versions

logger = logging.getLogger(__name__)

PUSH_ATTEMPTS = 4
WRITE_DEADLINE_S = 3600.0
NOTE_DEADLINE_S = 900.0


class Trainers(Protocol):
    """The ranks whose weights are pushed, with their way to the rollout manager (``RayTrainGroup``)."""

    args: Args

    def call_ranks(self, method: str, what: str, deadline_s: float, *args: object) -> list[Any]: ...

    def call_manager(self, method: str, what: str, *args: object, deadline_s: float | None = None) -> Any: ...

    def step_of_weights(self) -> int | None: ...

    def release(self) -> None: ...


class WeightPush:
    """Pushes weights of ``trainers`` to the engines that the manager offers; ``files`` are what a push can go through.

    Lost engines are waited for, and the others take the weights: from the ranks directly, or from files. What fails
    because of an engine is repeated without it. Engines that were new get requests when all have the version.
    """

    def __init__(self, args: Args, trainers: Trainers) -> None:
        self._trainers = trainers
        self.files = WeightFiles(args, self._publish, self._load)
        self._reported_step: int | None = None

    def run(self, synchronous_loop: bool, *, new_weights: bool) -> int | None:
        """Push; return the version of the weights, None when there are no engines.

        ``synchronous_loop`` means that nothing is generated meanwhile. Without ``new_weights`` the trainers have ended,
        and engines read the files that these have written last.
        """
        if new_weights:
            self.files.begin()
        manager = self._trainers.call_manager
        for attempt in range(1, PUSH_ATTEMPTS + 1):
            manager("recover_updatable_engines", "waiting for lost engines")
            engines: list[EngineInfo] = manager("get_updatable_engines", "asking for the engines")
            if not engines:
                return None
            try:
                version = self._send(engines, synchronous_loop)
                break
            except RemoteFailure as e:
                lost = self._drop(engines, e.data.get("hanging", {}))
                if not lost or attempt == PUSH_ATTEMPTS:
                    raise
                logger.warning("retrying the weight push without %s: %s", ", ".join(lost), e)
        self._report_step(version)
        manager("clear_updatable_num_new_engines", "sending requests to new engines", version)
        return version

    def _send(self, engines: list[EngineInfo], synchronous_loop: bool) -> int:
        args, ranks = self._trainers.args, self._trainers.call_ranks
        if args.update_weight_transport == "disk":
            version = self.files.push(engines, synchronous_loop)
            ranks("weights_synced", "noting a weight sync", NOTE_DEADLINE_S, synchronous_loop)
            return version
        deadline = 4 * args.weight_sync_timeout
        return int(ranks("update_weights", "pushing weights", deadline, engines, synchronous_loop)[0])

    def _drop(self, engines: Sequence[EngineInfo], hanging: Mapping[str, str]) -> list[str]:
        """Continue without engines that have exited or do not respond; return the names of those that are lost.

        ``hanging``: URL of an engine -> what it did not do in the push; other calls it may well answer.
        """
        manager = self._trainers.call_manager
        manager("mark_unreachable_engines_dead", "looking for the engine that failed", hanging)
        living = manager("get_updatable_engines", "asking for the engines that are left")
        return [f"engine {engine.rank}" for engine in engines if engine not in living]

    def _report_step(self, version: int) -> None:
        """Report to the manager which training step made ``version``, for drivers that do not (``--max-staleness``).

        Weights that no training changed count as before.
        """
        step = self._trainers.step_of_weights()
        if step is not None and step != self._reported_step:
            self._trainers.call_manager("weights_updated", "reporting the weight version", version, step)
            self._reported_step = step

    def _publish(self, version: int, engines: Sequence[EngineInfo], confirmed: int | None) -> str:
        """Let the trainers write the weights; with ``--release-train`` they make room for the engines then."""
        ranks, what = self._trainers.call_ranks, f"writing weight version {version}"
        directory = ranks("publish_weights", what, WRITE_DEADLINE_S, version, list(engines), confirmed)[0]
        if self._trainers.args.release_train:
            self._trainers.release()
            if self._trainers.args.offload_rollout:
                self._trainers.call_manager("onload_weights", "onloading the engines' weights")
        return str(directory)

    def _load(self, directory: str, version: int, synchronous_loop: bool) -> None:
        what, deadline_s = "loading weights from files", 6 * self._trainers.args.weight_sync_timeout
        self._trainers.call_manager("load_weights", what, directory, version, synchronous_loop, deadline_s=deadline_s)


class WeightFiles:
    """The versions below ``--update-weight-disk-dir``.

    ``publish(version, engines, confirmed)`` lets the trainers write one and returns its directory; ``load(directory,
    version, synchronous_loop)`` lets the engines that were last offered read it. With ``--update-weight-mode delta`` it
    holds what changed since version ``confirmed``, the last that all engines have loaded, and stays as long as later
    ones build on it. Otherwise a version that engines have read is removed,
    unless ``--update-weight-disk-keep-files``; with ``--release-train`` the last one stays until the next, since
    engines that die and are restarted before then need it, and the trainers that wrote it have ended.

    Attributes:
        version: number of the last version written.
    """

    def __init__(
        self,
        args: Args,
        publish: Callable[[int, Sequence[EngineInfo], int | None], str],
        load: Callable[[str, int, bool], Any],
    ) -> None:
        self.args = args
        # No flag: drivers of users may set it to continue the count of an earlier run.
        self.version = int(getattr(args, "update_weight_start_version", 0) or 0)
        self._publish, self._load = publish, load
        self._directory: str | None = None
        self._confirmed: int | None = None

    def begin(self) -> None:
        """The trainers have new weights: the next ``push`` writes them, and those after it read the same files."""
        self._directory = None

    def push(self, engines: Sequence[EngineInfo], synchronous_loop: bool) -> int:
        """Take the weights to ``engines``; return their version. May be tried again without writing again."""
        if self._directory is None:
            self._directory = self._write(engines)
        try:
            self._load(self._directory, self.version, synchronous_loop)
        except RemoteFailure as e:
            if not e.data.get("needs_full_version"):
                raise
            logger.warning("writing all weights again: %s", e)
            self._confirmed = None
            self._directory = self._write(engines)
            self._load(self._directory, self.version, synchronous_loop)
        self._confirmed = self.version
        if not self.args.release_train and self.args.update_weight_mode == "full":
            self.clear()
        return self.version

    def _write(self, engines: Sequence[EngineInfo]) -> str:
        directory = self._publish(self.version + 1, engines, self._confirmed)
        self.version += 1
        return directory

    def clear(self) -> None:
        """Remove what engines have read; nothing is pushed after that unless it is written again."""
        if self._directory is None or self.args.update_weight_disk_keep_files:
            return
        try:
            versions.clear(Path(self._directory).parent)
        except OSError as e:
            logger.warning("%s could not be removed: %s", self._directory, e)
