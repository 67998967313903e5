"""Weight sync through files, on the driver: trainers write a version, then engines read it."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import version_files
from slime.servers.types import EngineInfo

logger = logging.getLogger(__name__)


class WeightFiles:
    """The versions below ``--update-weight-disk-dir``.

    ``publish(version, engines)`` lets the trainers write one and returns its directory; ``load(directory, version,
    synchronous_loop)`` lets the engines that were last offered read it. A version that engines have read is removed,
    unless ``--update-weight-disk-keep-files``; with ``--release-train`` the last one stays until the next, since
    engines that die and are restarted before then need it, and the trainers that wrote it have ended.

    Attributes:
        version: number of the last version written.
    """

    def __init__(
        self,
        args: Namespace,
        publish: Callable[[int, Sequence[EngineInfo]], str],
        load: Callable[[str, int, bool], Any],
    ) -> None:
        self.args = args
        # No flag: drivers of users may set it to continue the count of an earlier run.
        self.version = int(getattr(args, "update_weight_start_version", 0) or 0)
        self._publish, self._load = publish, load
        self._directory: str | None = None

    def begin(self) -> None:
        """The trainers have new weights: the next ``push`` writes them, and those after it read the same files."""
        self._directory = None

    def push(self, engines: Sequence[EngineInfo], synchronous_loop: bool) -> int:
        """Take the weights to ``engines``; return their version. May be tried again without writing again."""
        if self._directory is None:
            self._directory = self._publish(self.version + 1, engines)
            self.version += 1
        self._load(self._directory, self.version, synchronous_loop)
        if not self.args.release_train:
            self.clear()
        return self.version

    def clear(self) -> None:
        """Remove what engines have read."""
        if self._directory is None or self.args.update_weight_disk_keep_files:
            return
        try:
            version_files.clear(Path(self._directory).parent)
        except OSError as e:
            logger.warning("%s could not be removed: %s", self._directory, e)
