"""Rollouts on disk by flag: written for debugging, read back to train on without engines."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slime.rollout.debug_data import load_rollout, save_rollout
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save(args: Namespace, name: int | str, samples: Sequence[Sample]) -> None:
    """Write ``samples`` to the path of ``--save-debug-rollout-data`` for rollout ``name``; whole or not at all."""
    path = Path(args.save_debug_rollout_data.format(rollout_id=name))
    save_rollout(path, name if isinstance(name, int) else int(name.rpartition("_")[2]), samples)
    logger.info("rollout %s: %d samples written to %s", name, len(samples), path)


def load(args: Namespace, rollout_id: int) -> list[Sample]:
    """Return the samples of the dump of ``rollout_id`` (``--load-debug-rollout-data``), subsampled when asked for.

    Raises FileNotFoundError or ValueError, naming file and flag.
    """
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    if not path.is_file():
        raise FileNotFoundError(
            f"--load-debug-rollout-data {args.load_debug_rollout_data}: no dump of rollout {rollout_id} at {path}; "
            "lower --num-rollout, or dump that rollout with --save-debug-rollout-data"
        )
    try:
        samples = load_rollout(path, args.load_debug_rollout_data_subsample)
    except ValueError as e:
        raise ValueError(f"--load-debug-rollout-data: {e}") from e
    logger.info("rollout %d: %d samples read from %s", rollout_id, len(samples), path)
    return samples
