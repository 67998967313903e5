"""Trainers that end while engines generate and restart from their checkpoint (``--release-train``)."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray

from slime.backends.megatron_utils.checkpoint_dir import iteration_dir

logger = logging.getLogger(__name__)

QUIT_DEADLINE_S = 30.0
ELSEWHERE_GRACE_S = 5.0
"""Grace for processes of other hosts, whose end cannot be observed from here."""


def end_actors(actors: Sequence[Any], where: Sequence[tuple[str, int]]) -> None:
    """End actors and return when their processes, and with them their device memory, are released.

    ``where``: the node and the process of each.
    """
    ray.wait([actor.quit.remote() for actor in actors], num_returns=len(actors), timeout=QUIT_DEADLINE_S)
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
    here = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + QUIT_DEADLINE_S
    for pid in [pid for node, pid in where if node == here]:
        while _is_alive(pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"trainer process {pid} is still there {QUIT_DEADLINE_S:.0f} s after it was ended")
            time.sleep(0.05)
    if any(node != here for node, _ in where):
        time.sleep(ELSEWHERE_GRACE_S)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie has given its memory back."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resume_args(args: Namespace, saved: int | None) -> Namespace:
    """Return the arguments of restarted trainers: those of the start until the run has saved, then its checkpoint.

    ``--ckpt-step``, ``--finetune``, ``--no-load-optim`` and ``--no-load-rng`` are about the start of the run.
    """
    if saved is None:
        return args
    resumed = copy.copy(args)
    resumed.load, resumed.ckpt_step = args.save, saved
    resumed.finetune = resumed.no_load_optim = resumed.no_load_rng = False
    return resumed


class TransientCheckpoints:
    """Checkpoints beyond ``--save-interval``, which only serve the restart: each is removed once the next is complete.

    One after which ``--ref-update-interval`` refreshed the reference is kept: it is loaded again.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self._transient: int | None = None

    def saved(self, rollout_id: int, *, due: bool) -> None:
        """Record that the checkpoint of ``rollout_id`` is complete."""
        before, self._transient = self._transient, None
        interval = self.args.ref_update_interval
        if not due and not (interval and (rollout_id + 1) % interval == 0):
            self._transient = rollout_id
        if before is not None and before != rollout_id:
            try:
                shutil.rmtree(iteration_dir(self.args.save, before))
            except OSError as e:
                logger.warning("cannot remove checkpoint %d, which --save-interval does not ask for: %s", before, e)
