"""Actor processes of a run: each becomes part of it, logs to its own file, and collects garbage between rollouts."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from pathlib import Path

from slime.arguments.args import Args
from slime.observability.best_effort import output
from slime.observability.logging_utils import MaskingFormatter, configure_logger, init_tracking
from slime.observability.run_dir import log_path
from slime.utils import shared_memory
from slime.utils.atomic_file import open_private
from slime.utils.network import get_current_node_ip, get_free_port
from slime.utils.process_guard import guard_self
from slime.utils.secrets import remember

logger = logging.getLogger(__name__)

TO_DRIVER = ("slime.observability.progress",)
"""Loggers whose INFO records the driver's terminal shows too (through Ray); of the others it shows warnings."""
ALLOCATIONS = 20_000
"""More objects than before, after which the youngest are collected (Python: 700)."""
YOUNG = 2
"""Collections of the youngest objects after which those that are a little older are collected (Python: 10)."""
NEVER = 2**30


class _ForDriver(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name in TO_DRIVER


def begin(args: Args, component: str) -> Path:
    """Make this actor process part of the run and return its log file, ``<run_dir>/logs/<component>.log``.

    Everything the process and its libraries print goes there, C++ output included; warnings and progress also reach
    the driver's terminal. Metrics logged in this process wait to be drained. What the process starts ends with it.
    """
    guard_self()
    remember(args)
    path = log_path(args, component)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    failure = _print_to(path)
    faulthandler.enable()
    configure_logger(component)
    handler = logging.StreamHandler(terminal)
    handler.addFilter(_ForDriver())
    handler.setFormatter(MaskingFormatter(f"[{component}] %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    if failure is not None:
        logger.warning("%s cannot be written, and %s logs to its terminal alone: %s", path, component, failure)
    free_shared = shared_memory.free_bytes()
    if free_shared is not None and free_shared < shared_memory.NEEDED_BYTES:
        logger.warning("%s; %s", shared_memory.words(), shared_memory.WAY_OUT)
    init_tracking(args, primary=False)
    logger.info("%s of run %s: pid %d", component, args.run_id, os.getpid())
    return path


def _print_to(path: Path) -> OSError | None:
    """Send all output of this process to ``path``; return why that is not possible.

    A disk that is full later raises nothing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        fd = open_private(path)
    except OSError as e:
        return e
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = output(1, "the log", path), output(2, "the log", path)
    return None


class RayActor:
    """A base class for users' Ray actors whose processes form a process group.

    ``master_addr`` and ``master_port`` are set by the subclass, usually on its first rank.
    """

    master_addr: str
    master_port: int

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 10000, consecutive: int = 1) -> tuple[str, int]:
        """Return this node's address and the first of ``consecutive`` free ports from ``start_port`` on."""
        return get_current_node_ip(), get_free_port(start_port=start_port, consecutive=consecutive)

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Return where the ranks meet."""
        return self.master_addr, self.master_port


def gc_freeze() -> None:
    """Exclude all objects of now from garbage collection (``gc.freeze``), and collect less often from now on.

    For a process that has loaded its modules and data: to traverse them, which finds nothing, blocks its event loop
    for tenths of a second as often as once per rollout. To traverse the tokens of a large rollout takes seconds: old
    objects are collected by ``collect_between_rollouts`` only. Reference counting frees nearly everything else.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, YOUNG, NEVER)


def collect_between_rollouts() -> None:
    """Collect all garbage, in a process that called ``gc_freeze``."""
    if gc.get_threshold()[2] == NEVER:
        gc.collect()
