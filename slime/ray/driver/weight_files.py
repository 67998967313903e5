"""Weight sync through files, on the driver: trainers write a version, then engines read it."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.ray.remote import RemoteFailure
from slime.servers.types import EngineInfo
from slime.weights import versions
from slime.weights.delta.host_copy import NO_WAY

logger = logging.getLogger(__name__)


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
        args: Namespace,
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
            if NO_WAY not in str(e):
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
        """Remove what engines have read; nothing is pushed after that unless it is written anew."""
        if self._directory is None or self.args.update_weight_disk_keep_files:
            return
        try:
            versions.clear(Path(self._directory).parent)
        except OSError as e:
            logger.warning("%s could not be removed: %s", self._directory, e)
