"""Combinations of loss, advantages and corrections; on-policy distillation."""

from __future__ import annotations

from pathlib import Path

from slime.algorithms.estimators import estimator_of
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.groups.rollout import GENERATE_WITH_ENGINES
from slime.arguments.rules import hf_config
from slime.arguments.rules.checkpoints import needs_teacher
from slime.arguments.rules.loop import SFT_ROLLOUT
from slime.arguments.rules.roles import ACTOR, role_args
from slime.arguments.rules.rollout import DISTILLATION


def check(args: Args) -> None:
    """Refuse combinations that contradict each other or lack a part."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        raise ArgumentError(
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} count the KL twice; set one of them to 0"
        )
    estimator = estimator_of(args)
    if args.kl_coef != 0 and estimator.kl is None:
        diagnostics.warn(
            args,
            f"--kl-coef {args.kl_coef} has no effect with --advantage-estimator {args.advantage_estimator}, whose "
            "advantage is the same for all tokens of a response; --use-kl-loss --kl-loss-coef adds the KL to the loss",
        )
    if args.reward_statistics == "samples" and not (estimator.baseline == "group" and args.rewards_normalization):
        raise ArgumentError(
            f"--reward-statistics samples has no effect with --advantage-estimator {args.advantage_estimator}"
            f"{'' if args.rewards_normalization else ' and --disable-rewards-normalization'}; leave it out"
        )
    _check_loss(args)
    _check_corrections(args)
    _check_reducer(args)
    if estimator.needs_whitening and not args.normalize_advantages:
        raise ArgumentError(f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages; add it")
    if args.only_train_params_name_list and args.freeze_params_name_list:
        raise ArgumentError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other; say it with one of them"
        )
    if args.compute_advantages_and_returns:
        return
    # Neither log-probs nor advantages are computed before the step: what works on them is not asked for.
    for flag in flags_where(lambda traits: traits.without_advantages):
        if getattr(args, flag.dest):
            raise ArgumentError(
                f"{flag.option} has no effect with --disable-compute-advantages-and-returns; leave one of them out"
            )


def _check_loss(args: Args) -> None:
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        raise ArgumentError("--loss-type custom_loss needs --custom-loss-function-path, your loss")
    if args.loss_type != "custom_loss" and args.custom_loss_function_path is not None:
        raise ArgumentError(
            f"--custom-loss-function-path is not used with --loss-type {args.loss_type}; add --loss-type custom_loss"
        )
    if (
        args.loss_type == "sft_loss"
        and args.rollout_function_path in GENERATE_WITH_ENGINES
        and not args.debug_rollout_only
    ):
        diagnostics.warn(
            args,
            f"--loss-type sft_loss with --rollout-function-path {args.rollout_function_path} trains on what engines "
            f"generate, whatever its reward; conversations of a file are read by {SFT_ROLLOUT}",
        )
    if args.eps_clip_high is not None and args.eps_clip_high < args.eps_clip and estimator_of(args).loss != "cispo":
        diagnostics.warn(
            args,
            f"--eps-clip-high {args.eps_clip_high} is below --eps-clip {args.eps_clip}: the upper clip is usually the "
            "wider one",
        )


def _check_corrections(args: Args) -> None:
    if args.use_rollout_logprobs and args.use_tis:
        raise ArgumentError(
            "--use-rollout-logprobs and --use-tis exclude each other: TIS corrects for the difference that "
            "--use-rollout-logprobs removes; leave one of them out"
        )
    if args.get_mismatch_metrics and args.custom_tis_function_path is None:
        raise ArgumentError("--get-mismatch-metrics needs --custom-tis-function-path, which computes them")
    if args.tis_clip_low > args.tis_clip:
        raise ArgumentError(f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; lower it")


def _check_reducer(args: Args) -> None:
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
    if args.pg_loss_reducer == "turn_mean":
        if args.pg_loss_length is not None:
            raise ArgumentError(
                f"--pg-loss-length {args.pg_loss_length} is the divisor of --pg-loss-reducer constant_length, not of "
                "turn_mean; leave it out"
            )
        return
    if args.pg_loss_length is None and args.rollout_max_response_len is None:
        raise ArgumentError(
            f"--pg-loss-reducer {args.pg_loss_reducer} divides by the longest response: give "
            "--rollout-max-response-len or --pg-loss-length"
        )


def check_advantages(args: Args) -> None:
    """The policy loss has what it needs. After the rules that know better why advantages must not be left out."""
    args = role_args(args, ACTOR)
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


def derive(args: Args) -> None:
    """Upper clip, the critic, and the standard deviation of groups of one."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    estimator = estimator_of(args)
    if estimator.loss == "cispo" and args.eps_clip < 1.0:
        diagnostics.warn(
            args,
            f"--advantage-estimator {estimator.name} usually has no lower clip: raise --eps-clip {args.eps_clip} to "
            "1.0 or more",
        )
    if args.pg_loss_reducer == "constant_length" and args.pg_loss_length is None:
        args.pg_loss_length = args.rollout_max_response_len
    args.use_critic = estimator.needs_critic
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
        _warn_of_groups_of_one(args)
    if args.use_critic and args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        diagnostics.warn(
            args,
            f"--num-critic-only-steps {args.num_critic_only_steps} is not below --num-rollout {args.num_rollout}: the "
            "critic alone is trained, and the actor stays as it is",
        )


def _warn_of_groups_of_one(args: Args) -> None:
    """The mean of a group of one is its reward, so that nothing is left of it."""
    trains = args.loss_type == "policy_loss" and args.compute_advantages_and_returns and not args.debug_rollout_only
    custom = args.custom_reward_post_process_path or args.custom_advantage_function_path
    fans_out = args.custom_generate_function_path or args.custom_convert_samples_to_train_data_path
    if not trains or custom or fans_out or args.num_rollout == 0:
        return
    if estimator_of(args).baseline is not None and args.rewards_normalization:
        diagnostics.warn(
            args,
            f"--advantage-estimator {args.advantage_estimator} with --n-samples-per-prompt 1: every reward minus the "
            "mean of its group is 0, so nothing is learned from rewards; generate more samples per prompt or give "
            "--disable-rewards-normalization",
        )


def check_distillation(args: Args) -> None:
    """A teacher needs a place to run."""
    if args.use_opd:
        _check_teacher(args)
    elif args.opd_teacher_load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load} is not read without --use-opd; add it or leave this out"
        )


def _check_teacher(args: Args) -> None:
    if args.opd_type is None:
        raise ArgumentError(
            "--use-opd needs --opd-type: sglang (a teacher behind --rm-url) or megatron (--opd-teacher-load)"
        )
    if args.loss_type == "sft_loss":
        raise ArgumentError("--use-opd changes advantages, which --loss-type sft_loss does not have; leave one out")
    if not args.compute_advantages_and_returns:
        raise ArgumentError(
            "--use-opd changes advantages, which --disable-compute-advantages-and-returns leaves out; leave one out"
        )
    if args.opd_type == "sglang":
        _check_server(args)
    else:
        _check_checkpoint(args)


def _check_server(args: Args) -> None:
    if args.opd_teacher_load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load} is for --opd-type megatron; with --opd-type sglang the "
            "teacher answers at --rm-url, so leave it out"
        )
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and args.load_debug_rollout_data is None
    hooks = flags_where(lambda traits: traits.hook and traits.hook.changes_samples)
    if generates and not any(getattr(args, flag.dest) for flag in hooks):
        raise ArgumentError(
            f"--use-opd --opd-type sglang: nothing asks a teacher for log-probs; give --custom-rm-path "
            f"{DISTILLATION}.reward_func with --rm-url, and --custom-reward-post-process-path "
            f"{DISTILLATION}.post_process_rewards"
        )


def _check_checkpoint(args: Args) -> None:
    load = args.opd_teacher_load
    if load is None:
        raise ArgumentError("--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint")
    if args.custom_rm_path == f"{DISTILLATION}.reward_func":
        raise ArgumentError(
            f"--custom-rm-path {args.custom_rm_path} asks a teacher's server, but with --opd-type megatron the teacher "
            "is in the trainer; use --opd-type sglang, or another reward such as --rm-type math"
        )
    if args.debug_rollout_only:
        return
    if not Path(load).is_dir():
        diagnostics.unavailable(args, f"--opd-teacher-load {load}: there is no such directory")
        return
    if args.opd_teacher_ckpt_step is not None and (Path(load) / "config.json").is_file():
        raise ArgumentError(
            f"--opd-teacher-ckpt-step {args.opd_teacher_ckpt_step}: --opd-teacher-load {load} is a Hugging Face "
            "checkpoint, which has no steps; leave it out"
        )


def check_teacher_architecture(args: Args) -> None:
    """A teacher in the trainer takes turns with the student in one model: the model flags must describe it too."""
    if args.opd_teacher_load is None or not needs_teacher(args):
        return
    if not (Path(args.opd_teacher_load) / "config.json").is_file():
        return  # a Megatron checkpoint: its shapes are compared when it is loaded
    wrong = hf_config.differences(args, hf_config.read_config(args.opd_teacher_load, "--opd-teacher-load"))
    if wrong:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load}: with --opd-type megatron the teacher must have the student's "
            f"architecture, but {'; '.join(wrong)}. A teacher of another one can answer from a server: --opd-type "
            "sglang"
        )
