"""Removal of older checkpoints: ``--most-recent-k``, ``--save-retain-interval``. No torch, no Megatron: plain files."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from slime.arguments.args import Args
from slime.backends.megatron_utils.checkpoints.directory import REPLACED, rollout_files

logger = logging.getLogger(__name__)


def outdated(args: Args, iterations: list[int], newest: int) -> list[int]:
    """Return which of ``iterations`` may go now that ``newest`` is complete, in ascending order.

    Kept are the last ``--most-recent-k``; those after every ``--save-retain-interval`` rollouts, without the other flag
    beside the newest one; and what the reference and a teacher are loaded from. A run with a critic keeps two
    of each: killed between its two saves it resumes from the ones before. Later iterations than ``newest``, of a run
    that was resumed from an earlier one, are left alone.
    """
    count, every = args.most_recent_k, args.save_retain_interval
    if count < 1 and every is None:
        return []
    older = sorted(i for i in iterations if i <= newest)
    kept = set(older[-max(count, 2 if args.use_critic else 1) :])
    if every is not None:
        kept |= {i for i in older if (i + 1) % every == 0}
    if interval := args.ref_update_interval:
        kept.add((newest + 1) // interval * interval - 1)
    kept |= {step for step in (args.ref_ckpt_step, args.opd_teacher_ckpt_step) if step is not None}
    return [i for i in older if i not in kept]


def remove_outdated(args: Args, root: Path, newest: int) -> None:
    """Remove the checkpoints below ``root`` that are outdated, with the states of the rollouts that belong to them.

    What cannot be removed is a warning: the checkpoints that count are complete.
    """
    present = {int(found[1]): path for path in root.iterdir() if (found := re.fullmatch(r"iter_(\d{7,})", path.name))}
    for iteration in outdated(args, list(present), newest):
        aside = present[iteration].with_name(present[iteration].name + REPLACED)
        try:
            os.replace(present[iteration], aside)  # one that is half removed is none
            for name in rollout_files(root, iteration):
                (root / name).unlink()
            shutil.rmtree(aside)
        except OSError as e:
            logger.warning("cannot remove checkpoint %s, which is outdated: %s", present[iteration], e)
        else:
            logger.info("removed %s", present[iteration])
