"""A rollout that only waits, to keep engines up for work from outside."""

from __future__ import annotations

import logging
import time
from typing import NoReturn

from slime.arguments.args import Args
from slime.utils.moved import also_named

__all__ = ["sleep"]

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 3600.0


@also_named(data_buffer="data_source")
def sleep(args: Args, rollout_id: int, data_source: object, evaluation: bool = False) -> NoReturn:
    """Never return; say so every hour."""
    began = time.monotonic()
    while True:
        hours = (time.monotonic() - began) / 3600
        logger.info("engines are kept up (rollout %d, %.0f h so far); end the run to stop", rollout_id, hours)
        time.sleep(LOG_INTERVAL_S)
