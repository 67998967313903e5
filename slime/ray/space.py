"""The space that a run needs, as it is at the start: of checkpoints, weight files, and shared memory."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.utils import shared_memory

logger = logging.getLogger(__name__)

TEMPORARY_BYTES = 256 << 20
OPTIMIZER_SHARE = 7
"""Bytes of a checkpoint with Adam's state per byte of bf16 weights: 2 + 4 + 4 + 4 in place of 2."""


def look(args: Args) -> None:
    """Log what is free for what the run writes, and warn where it is less than is written at a time.

    Raises ArgumentError where shared memory has too little for an engine or a trainer to start.
    """
    for what, path, needed in _needs(args):
        free = shutil.disk_usage(_existing(Path(path))).free
        words = f"{what} {path}: {free / 2**30:.1f} GiB free"
        if needed is not None:
            words += f", of which about {needed / 2**30:.1f} GiB are needed at a time"
        logger.log(logging.WARNING if needed is not None and free < needed else logging.INFO, "%s", words)
    free_shared = shared_memory.free_bytes()
    if free_shared is not None and free_shared < shared_memory.NEEDED_BYTES:
        raise ArgumentError(
            f"{shared_memory.words()}, and the processes of the run need at least "
            f"{shared_memory.NEEDED_BYTES >> 20}: {shared_memory.WAY_OUT}"
        )
    scarce = free_shared is not None and free_shared < shared_memory.SCARCE_BYTES
    logger.log(logging.WARNING if scarce else logging.INFO, "shared memory: %s", shared_memory.words())


def _needs(args: Args) -> Iterator[tuple[str, str, float | None]]:
    """Yield flag, directory and about how many bytes are written at a time; None where that is not known."""
    trains = not args.debug_rollout_only and not args.serve_only
    weights = _weights_of(args.hf_checkpoint)
    if trains and args.save and args.save_interval is not None:
        whole = None if args.lora_rank or weights is None else weights
        yield "--save", args.save, whole and whole * (1 if args.no_save_optim else OPTIMIZER_SHARE)
    if trains and not args.debug_train_only and args.update_weight_transport == "disk":
        yield "--update-weight-disk-dir", args.update_weight_disk_dir, weights
    if args.run_dir:
        yield "--run-dir", args.run_dir, None
    yield "temporary files of Ray and engines:", tempfile.gettempdir(), TEMPORARY_BYTES


def _weights_of(checkpoint: str | None) -> int | None:
    """Return the bytes of a Hugging Face checkpoint's weights; None for one that is not on this host."""
    files = list(Path(checkpoint).glob("*.safetensors")) if checkpoint else []
    return sum(path.stat().st_size for path in files) or None


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
