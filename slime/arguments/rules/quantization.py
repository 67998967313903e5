"""Engines of a quantised checkpoint need quantised weights at every sync, which nothing makes of the trainer's yet."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from slime.arguments.errors import ArgumentError
from slime.arguments.models.known import quantization_by_name


def check(args: Namespace) -> None:
    """Refuse a quantised ``--hf-checkpoint`` whose engines would be sent weights; a dry run lists it."""
    if args.debug_train_only or args.debug_rollout_only or not args.rollout_num_gpus:
        return
    method = _method(args.hf_checkpoint)
    if method in (None, "bf16", "fp16"):
        return
    message = (
        f"--hf-checkpoint {args.hf_checkpoint} is quantised ({method}): weights that are quantised before they go to "
        "the engines are not available yet in this version; give a bf16 checkpoint"
    )
    if not args.dry_run:
        raise ArgumentError(message)
    args.not_available.append(message)


def _method(checkpoint: str) -> str | None:
    """The quantisation that ``config.json`` names; where there is none, the one that the directory's name does."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        return quantization_by_name(checkpoint)
    described = json.loads(path.read_text()).get("quantization_config") or {}
    return described.get("quant_method") if isinstance(described, dict) else None
