"""Combinations of loss, advantages and corrections."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import roles as role_args
from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError

GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo")


def check(args: Namespace) -> None:
    """Refuse combinations that contradict each other or lack a part."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        raise ArgumentError(
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} count the KL twice; set one of them to 0"
        )
    _check_loss(args)
    _check_corrections(args)
    _check_reducer(args)
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        raise ArgumentError(f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages; add it")
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise ArgumentError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other; say it with one of them"
        )
    if not args.compute_advantages_and_returns:
        _check_without_advantages(args)


def _check_loss(args: Namespace) -> None:
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        raise ArgumentError("--loss-type custom_loss needs --custom-loss-function-path, your loss")
    if args.loss_type != "custom_loss" and args.custom_loss_function_path is not None:
        raise ArgumentError(
            f"--custom-loss-function-path is not used with --loss-type {args.loss_type}; add --loss-type custom_loss"
        )
    if args.eps_clip_high is not None and args.eps_clip_high < args.eps_clip and args.advantage_estimator != "cispo":
        unchecked.warn(
            args,
            f"--eps-clip-high {args.eps_clip_high} is below --eps-clip {args.eps_clip}: the upper clip is usually the "
            "wider one",
        )


def _check_corrections(args: Namespace) -> None:
    if args.use_rollout_logprobs and args.use_tis:
        raise ArgumentError(
            "--use-rollout-logprobs and --use-tis exclude each other: TIS corrects for the difference that "
            "--use-rollout-logprobs removes; leave one of them out"
        )
    if args.get_mismatch_metrics and args.custom_tis_function_path is None:
        raise ArgumentError("--get-mismatch-metrics needs --custom-tis-function-path, which computes them")
    if args.tis_clip_low > args.tis_clip:
        raise ArgumentError(f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; lower it")


def _check_reducer(args: Namespace) -> None:
    if args.pg_loss_reducer == "rollout_mean":
        if args.pg_loss_length is not None:
            raise ArgumentError(
                f"--pg-loss-length {args.pg_loss_length} is the divisor of --pg-loss-reducer constant_length; add it"
            )
        return
    if args.loss_type != "policy_loss":
        raise ArgumentError(
            f"--pg-loss-reducer {args.pg_loss_reducer} has no effect with --loss-type {args.loss_type}; leave it out"
        )
    for name in ("calculate_per_token_loss", "custom_pg_loss_reducer_function_path"):
        if getattr(args, name):
            raise ArgumentError(
                f"--pg-loss-reducer {args.pg_loss_reducer} and --{name.replace('_', '-')} both say what the policy "
                "loss is divided by; leave one of them out"
            )
    if args.pg_loss_length is None and args.rollout_max_response_len is None:
        raise ArgumentError(
            f"--pg-loss-reducer {args.pg_loss_reducer} divides by the longest response: give "
            "--rollout-max-response-len or --pg-loss-length"
        )


def _check_without_advantages(args: Namespace) -> None:
    """Neither log-probs nor advantages are computed before the step: what works on them is not asked for."""
    for name in ("kl_coef", "custom_advantage_function_path", "normalize_advantages", "use_rollout_entropy"):
        if getattr(args, name):
            raise ArgumentError(
                f"--{name.replace('_', '-')} has no effect with --disable-compute-advantages-and-returns; "
                "leave one of them out"
            )


def check_advantages(args: Namespace) -> None:
    """The policy loss has what it needs. After the rules that know better why advantages must not be left out."""
    args = role_args.actor_args(args)
    if args.compute_advantages_and_returns or args.loss_type != "policy_loss" or args.debug_rollout_only:
        return
    if args.rollout_data_postprocess_path or args.custom_convert_samples_to_train_data_path:
        return  # they may set anything
    if args.use_kl_loss:
        raise ArgumentError(
            "--use-kl-loss needs the reference's log-probs, which --disable-compute-advantages-and-returns leaves out; "
            "leave one of them out"
        )
    raise ArgumentError(
        "--loss-type policy_loss needs advantages: leave out --disable-compute-advantages-and-returns, or set them "
        "yourself with --rollout-data-postprocess-path or --custom-convert-samples-to-train-data-path"
    )


def derive(args: Namespace) -> None:
    """Upper clip, the critic, and the standard deviation of groups of one."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.advantage_estimator == "cispo" and args.eps_clip < 1.0:
        unchecked.warn(
            args,
            f"--advantage-estimator cispo usually has no lower clip: raise --eps-clip {args.eps_clip} to 1.0 or more",
        )
    if args.pg_loss_reducer == "constant_length" and args.pg_loss_length is None:
        args.pg_loss_length = args.rollout_max_response_len
    args.use_critic = args.advantage_estimator == "ppo"
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
        _warn_of_groups_of_one(args)
    if args.use_critic and args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        unchecked.warn(
            args,
            f"--num-critic-only-steps {args.num_critic_only_steps} is not below --num-rollout {args.num_rollout}: the "
            "critic alone is trained, and the actor stays as it is",
        )


def _warn_of_groups_of_one(args: Namespace) -> None:
    """The mean of a group of one is its reward, so that nothing is left of it."""
    trains = args.loss_type == "policy_loss" and args.compute_advantages_and_returns and not args.debug_rollout_only
    custom = args.custom_reward_post_process_path or args.custom_advantage_function_path
    fans_out = args.custom_generate_function_path or args.custom_convert_samples_to_train_data_path
    if not trains or custom or fans_out or args.num_rollout == 0:
        return
    if args.advantage_estimator in GROUP_NORMALISED and args.rewards_normalization:
        unchecked.warn(
            args,
            f"--advantage-estimator {args.advantage_estimator} with --n-samples-per-prompt 1: every reward minus the "
            "mean of its group is 0, so nothing is learnt from rewards; generate more samples per prompt or give "
            "--disable-rewards-normalization",
        )
