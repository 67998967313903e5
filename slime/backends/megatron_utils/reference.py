"""Which weights the reference model has when a run with ``--ref-update-interval`` is resumed."""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.backends.megatron_utils.checkpoint_dir import find_checkpoint, is_megatron_checkpoint, iteration_dir

logger = logging.getLogger(__name__)


def refreshed_reference(args: Namespace) -> tuple[str, int] | None:
    """Return (root, iteration) of the checkpoint whose weights the reference had when the run stopped, or None.

    After rollout ``r`` with ``(r + 1) % interval == 0`` the actor becomes the reference, so on resume it is the actor
    of the last such rollout and not ``--ref-load``. None: nothing is resumed, the reference was never refreshed, or
    (with a warning, since the KL term changes then) that iteration was not saved.
    """
    interval, load = args.ref_update_interval, args.load
    if not interval or not is_megatron_checkpoint(load) or args.finetune:
        return None
    _, iteration = find_checkpoint(load, args.ckpt_step)
    refreshed = 0 if iteration is None else (iteration + 1) // interval * interval
    if refreshed == 0:
        return None
    if not iteration_dir(load, refreshed - 1).is_dir():
        logger.warning(
            "the reference was last refreshed after rollout %d, which %s has no checkpoint of: it starts again from "
            "--ref-load, and the KL to it jumps. Let --ref-update-interval be a multiple of --save-interval",
            refreshed - 1,
            load,
        )
        return None
    return str(load), refreshed - 1
