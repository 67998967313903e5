"""Rollouts on disk: written for debugging, read back to train on without engines."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def save(args: Namespace, name: int | str, samples: Sequence[Sample]) -> None:
    """Write ``samples`` to the path of ``--save-debug-rollout-data`` for rollout ``name``; whole or not at all."""
    path = Path(args.save_debug_rollout_data.format(rollout_id=name))
    path.parent.mkdir(parents=True, exist_ok=True)
    rollout_id = name if isinstance(name, int) else int(name.rpartition("_")[2])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, temporary)
    temporary.replace(path)
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
        dump = torch.load(path, map_location="cpu", weights_only=True)
        samples = [Sample.from_dict(entry) for entry in dump["samples"]]
    except Exception as e:
        raise ValueError(
            f"--load-debug-rollout-data: {path} is not a rollout dump that can be read safely "
            f"(a dict with 'samples' of plain values and tensors): {type(e).__name__}: {e}"
        ) from e
    ratio = args.load_debug_rollout_data_subsample
    if ratio is not None:
        samples = subsample(samples, ratio)
    logger.info("rollout %d: %d samples read from %s", rollout_id, len(samples), path)
    return samples


def subsample(samples: list[Sample], ratio: float) -> list[Sample]:
    """Keep the first half and the last half of ``ratio`` of the samples."""
    n = int(len(samples) * ratio)
    # Floor division of the negative number: an odd count takes one more from the tail.
    return samples[: n // 2] + samples[-n // 2 :] if n else []
