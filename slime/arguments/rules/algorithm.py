"""Combinations of loss, advantages and corrections."""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.arguments.errors import ArgumentError

logger = logging.getLogger(__name__)


def check(args: Namespace) -> None:
    """Refuse combinations that contradict each other or lack a part."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        raise ArgumentError(
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} count the KL twice; set one of them to 0"
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        raise ArgumentError(f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss; add it")
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        raise ArgumentError(f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages")
    if args.use_rollout_logprobs and args.use_tis:
        raise ArgumentError(
            "--use-rollout-logprobs and --use-tis exclude each other: TIS corrects for the difference that "
            "--use-rollout-logprobs removes; leave one of them out"
        )
    if args.get_mismatch_metrics and args.custom_tis_function_path is None:
        raise ArgumentError("--get-mismatch-metrics needs --custom-tis-function-path, which computes them")
    if args.tis_clip_low > args.tis_clip:
        raise ArgumentError(f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}")
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        raise ArgumentError("--loss-type custom_loss needs --custom-loss-function-path")
    if args.loss_type != "custom_loss" and args.custom_loss_function_path is not None:
        raise ArgumentError(
            f"--custom-loss-function-path is not used with --loss-type {args.loss_type}; add --loss-type custom_loss"
        )
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise ArgumentError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other; say it with one of them"
        )
    if args.use_unbiased_kl and not args.use_kl_loss:
        raise ArgumentError("--use-unbiased-kl changes the KL of --use-kl-loss and has no effect without it; add it")
    if not args.compute_advantages_and_returns:
        _check_without_advantages(args)
    if args.ref_update_interval is not None and args.kl_coef == 0 and not args.use_kl_loss:
        raise ArgumentError(
            f"--ref-update-interval {args.ref_update_interval} needs a reference model: add --use-kl-loss or --kl-coef"
        )
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        raise ArgumentError("--mask-offpolicy-in-partial-rollout needs --partial-rollout")


def _check_without_advantages(args: Namespace) -> None:
    """Neither log-probs nor advantages are computed before the step: what works on them is not asked for."""
    for name in ("kl_coef", "custom_advantage_function_path", "normalize_advantages", "use_rollout_entropy"):
        if getattr(args, name):
            raise ArgumentError(
                f"--{name.replace('_', '-')} has no effect with --disable-compute-advantages-and-returns; "
                "leave one of them out"
            )


def derive(args: Namespace) -> None:
    """Upper clip, the critic, and the standard deviation of groups of one."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.advantage_estimator == "cispo" and args.eps_clip < 1.0:
        logger.warning("--advantage-estimator cispo usually has no lower clip: set --eps-clip to 1.0 or more")
    args.use_critic = args.advantage_estimator == "ppo"
    args.critic_num_nodes = args.actor_num_nodes
    args.critic_num_gpus_per_node = args.actor_num_gpus_per_node
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
