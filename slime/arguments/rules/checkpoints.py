"""Which checkpoint is read, and where checkpoints are written."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from slime.arguments.errors import ArgumentError

TRACKER = "latest_checkpointed_iteration.txt"
logger = logging.getLogger(__name__)


def is_megatron_checkpoint(path: str | None) -> bool:
    """Whether ``path`` is a directory with Megatron's tracker file."""
    return path is not None and (Path(path) / TRACKER).is_file()


def is_hf_checkpoint(path: str | None) -> bool:
    """Whether ``path`` is a directory with a Hugging Face ``config.json``."""
    return path is not None and (Path(path) / "config.json").is_file()


def fall_back_to_hf_checkpoint(args: Namespace) -> None:
    """``--ref-load`` is ``--hf-checkpoint`` unless given; a reference that is needed must exist."""
    if args.ref_load is None:
        args.ref_load = args.hf_checkpoint
    needs_reference = (args.kl_coef != 0 or args.use_kl_loss) and not args.debug_rollout_only
    if needs_reference and not Path(args.ref_load).is_dir():
        why = "--kl-coef" if args.kl_coef != 0 else "--use-kl-loss"
        raise ArgumentError(
            f"{why} needs a reference model, but --ref-load {args.ref_load} is no directory; "
            "give a Megatron or a Hugging Face checkpoint"
        )
    if needs_reference and not is_megatron_checkpoint(args.ref_load) and not is_hf_checkpoint(args.ref_load):
        logger.warning("--ref-load %s has neither %s nor config.json", args.ref_load, TRACKER)


def resolve_load(args: Namespace) -> None:
    """Continue a Megatron checkpoint when ``--load`` is one; otherwise start from weights alone, at rollout 0."""
    if args.ref_ckpt_step is not None and not is_megatron_checkpoint(args.ref_load):
        raise ArgumentError(
            f"--ref-ckpt-step {args.ref_ckpt_step}: --ref-load {args.ref_load} has no {TRACKER} and so no steps; "
            "leave it out"
        )
    if is_megatron_checkpoint(args.load):
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if not is_hf_checkpoint(args.load):
        if args.load is not None and args.load != args.save:
            logger.warning("--load %s is no checkpoint (yet): starting from %s", args.load, args.ref_load)
        if not Path(args.ref_load).is_dir() and not args.debug_rollout_only:
            raise ArgumentError(f"--ref-load {args.ref_load} is no directory, and the first weights are read from it")
        args.load = args.ref_load
        if args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
    if args.ckpt_step is not None and not is_megatron_checkpoint(args.load):
        raise ArgumentError(f"--ckpt-step {args.ckpt_step}: --load {args.load} has no {TRACKER} and so no steps")
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def check_save(args: Namespace) -> None:
    """Intervals and exports need a directory to save to."""
    if args.save_interval is not None and args.save is None:
        raise ArgumentError(f"--save-interval {args.save_interval} needs --save DIRECTORY")
    if args.save is not None and args.save_interval is None:
        logger.warning("--save %s: nothing is saved without --save-interval N", args.save)
    if args.save_hf is not None:
        if args.save is None:
            raise ArgumentError(f"--save-hf {args.save_hf} is written with every checkpoint and needs --save DIRECTORY")
        if "{rollout_id}" not in args.save_hf:
            raise ArgumentError(
                f"--save-hf {args.save_hf} has no {{rollout_id}} in it, so every export would overwrite the last one; "
                "write for example exports/{rollout_id}"
            )
