"""Low-rank adapters (``--lora-rank``): the base model stays as it is, and is the reference."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.checkpoints import is_megatron_checkpoint


def check(args: Namespace) -> None:
    """Refuse what would change the base model, or take something else for it."""
    if not args.lora_rank:
        return
    for option, given in (
        ("--only-train-params-name-list", args.only_train_params_name_list),
        ("--freeze-params-name-list", args.freeze_params_name_list),
    ):
        if given:
            raise ArgumentError(
                f"{option}: --lora-rank freezes the whole model and trains adapters; leave it out, and choose layers "
                "with --lora-target-modules"
            )
    if args.enable_mtp_training:
        raise ArgumentError("--enable-mtp-training: --lora-rank freezes the MTP layers, too; leave one of them out")
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate != 0:
        raise ArgumentError(
            f"--moe-router-bias-update-rate {args.moe_router_bias_update_rate}: --lora-rank keeps the model's routers "
            "as they are; give --moe-router-bias-update-rate 0"
        )
    if args.moe_shared_expert_overlap:
        raise ArgumentError(
            "--moe-shared-expert-overlap computes shared experts without the communication that their adapters "
            "(--lora-rank) need; leave it out"
        )
    if args.ref_update_interval is not None:
        raise ArgumentError(
            "--ref-update-interval: with --lora-rank the reference is the model without adapters and cannot become "
            "another one; leave it out"
        )
    _check_load(args)


def _check_load(args: Namespace) -> None:
    """After ``--load`` is resolved: it is ``--ref-load`` then, unless it is a checkpoint of its own."""
    if args.debug_rollout_only or is_megatron_checkpoint(args.load):
        return
    if Path(args.load).absolute() != Path(args.ref_load).absolute():
        raise ArgumentError(
            f"--load {args.load} is a Hugging Face checkpoint: with --lora-rank it is --ref-load (default: "
            "--hf-checkpoint) that gives the model under the adapters; give it as --ref-load, or to continue an "
            "adapter --lora-adapter-path"
        )
