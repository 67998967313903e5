"""On-policy distillation and multi-token prediction."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError


def check(args: Namespace) -> None:
    """A teacher needs a place to run, and heads that are trained must exist."""
    if args.use_opd:
        _check_teacher(args)
    elif args.opd_teacher_load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load} is not read without --use-opd; add it or leave this out"
        )
    if args.enable_mtp_training and args.mtp_num_layers is None:
        raise ArgumentError("--enable-mtp-training needs --mtp-num-layers, the number of prediction layers to train")


def _check_teacher(args: Namespace) -> None:
    if args.opd_type is None:
        raise ArgumentError(
            "--use-opd needs --opd-type: sglang (a teacher behind --rm-url) or megatron (--opd-teacher-load)"
        )
    load = args.opd_teacher_load
    if args.opd_type == "sglang" and load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {load} is for --opd-type megatron; with --opd-type sglang the teacher answers at "
            "--rm-url, so leave it out"
        )
    if args.opd_type == "megatron" and load is None:
        raise ArgumentError("--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint")
    if args.opd_type == "megatron" and not Path(load).is_dir() and not args.debug_rollout_only:
        unchecked.missing(args, f"--opd-teacher-load {load}: there is no such directory")
