"""TensorBoard curves of plug-ins that write their own, beside those of the run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from slime.observability.tracking import tensorboard_dir
from slime.observability.writers import TensorBoardWriter
from slime.utils.misc import SingletonMeta


class _TensorboardAdapter(metaclass=SingletonMeta):
    """One event file per process, in the directory of ``--tb-project-name`` (see ``tensorboard_dir``).

    Raises ValueError without ``--use-tensorboard``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if not args.use_tensorboard:
            raise ValueError("_TensorboardAdapter writes event files only with --use-tensorboard")
        self._writer = TensorBoardWriter(tensorboard_dir(args))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Add the numbers of ``data`` at ``step``."""
        self._writer.write("step", step, data, time.time())

    def finish(self) -> None:
        """Flush and close the file."""
        self._writer.close()
