"""Flags that have no effect without another one: each that is given alone is warned about, in one sentence.

What cannot be meant at all is refused elsewhere; these come from launch scripts in which a block was switched off.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from slime.algorithms.estimators import WITH_CRITIC
from slime.arguments import diagnostics
from slime.arguments.errors import ArgumentError
from slime.arguments.groups import slime_flags
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES


class FlagDependency(NamedTuple):
    """``names`` (attributes) need ``option``; ``present`` says whether it is there."""

    option: str
    present: Callable[[Namespace], object]
    names: tuple[str, ...]


DEPENDENCIES: tuple[FlagDependency, ...] = (
    FlagDependency("--use-wandb", lambda args: args.use_wandb, (
        "wandb_mode", "wandb_dir", "wandb_key", "wandb_host", "wandb_team", "wandb_group", "wandb_project",
        "wandb_run_id", "wandb_random_suffix",
    )),
    FlagDependency("--use-tensorboard", lambda args: args.use_tensorboard, ("tb_project_name", "tb_experiment_name")),
    FlagDependency("--use-tis or --get-mismatch-metrics", lambda args: args.use_tis or args.get_mismatch_metrics, (
        "tis_clip", "tis_clip_low", "custom_tis_function_path",
    )),
    FlagDependency("--lora-rank", lambda args: args.lora_rank, (
        "lora_alpha", "lora_target_modules", "lora_dropout", "lora_adapter_path", "lora_sync",
    )),
    FlagDependency("--use-opsm", lambda args: args.use_opsm, ("opsm_delta",)),
    FlagDependency("--use-opd", lambda args: args.use_opd, ("opd_type", "opd_kl_coef", "opd_teacher_ckpt_step")),
    FlagDependency("--rollout-buffer-url", lambda args: args.rollout_buffer_url is not None, (
        "fetch_trajectory_retry_times", "rollout_task_type",
    )),
    FlagDependency("--enable-mtp-training", lambda args: args.enable_mtp_training, ("mtp_loss_scaling_factor",)),
    FlagDependency("--use-kl-loss", lambda args: args.use_kl_loss, ("kl_loss_coef", "use_unbiased_kl")),
    FlagDependency("--use-kl-loss or --kl-coef", lambda args: args.use_kl_loss or args.kl_coef != 0, (
        "kl_loss_type", "ref_update_interval",
    )),
    FlagDependency(f"--advantage-estimator {WITH_CRITIC}", lambda args: args.use_critic, (
        "value_clip", "num_critic_only_steps", "lambd",
    )),
    FlagDependency("--use-fault-tolerance", lambda args: args.use_fault_tolerance, (
        "rollout_health_check_interval", "rollout_health_check_timeout", "rollout_health_check_first_wait",
        "rollout_health_check_failures",
    )),
    FlagDependency("--custom-engine-scaling-path", lambda args: args.custom_engine_scaling_path is not None, (
        "engine_scaling_interval",
    )),
    FlagDependency("--update-weight-transport disk", lambda args: args.update_weight_transport == "disk", (
        "update_weight_disk_dir", "update_weight_disk_keep_files", "update_weight_local_checkpoint_dir",
        "custom_update_weight_post_write_path",
    )),
    FlagDependency("--update-weight-transport p2p", lambda args: args.update_weight_transport == "p2p", (
        "update_weight_p2p_backend",
    )),
    FlagDependency(
        "--update-weight-mode delta", lambda args: args.update_weight_mode == "delta" or args.rollout_external, (
            "update_weight_delta_encoding", "update_weight_delta_checksum", "update_weight_delta_full_interval",
        ),
    ),
    FlagDependency(
        "--update-weight-local-checkpoint-dir", lambda args: args.update_weight_local_checkpoint_dir is not None, (
            "sglang_custom_pull_weights_pre_read_hook",
        ),
    ),
    FlagDependency("--record-memory-history", lambda args: args.record_memory_history, (
        "memory_snapshot_dir", "memory_snapshot_num_steps", "memory_recorder", "memory_snapshot_path",
    )),
    FlagDependency("--use-pytorch-profiler", lambda args: args.use_pytorch_profiler, (
        "profile_step_start", "profile_step_end", "profile_ranks", "profile_target", "tensorboard_dir",
    )),
    FlagDependency("--ci-test", lambda args: args.ci_test, (
        "ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold",
    )),
    FlagDependency("--save", lambda args: args.save is not None, ("async_save",)),
    FlagDependency("--save", lambda args: args.save is not None or args.use_stateless_adam, ("no_save_optim",)),
    FlagDependency("--use-dynamic-batch-size", lambda args: args.use_dynamic_batch_size, ("max_tokens_per_gpu",)),
    FlagDependency("--apply-chat-template", lambda args: (
        args.apply_chat_template or args.custom_generate_function_path is not None
        or args.rollout_function_path not in GENERATE_WITH_ENGINES
        or any(dataset.apply_chat_template for dataset in args.eval_datasets)
    ), ("apply_chat_template_kwargs",)),
    FlagDependency("--router-policy manual or consistent_hashing", lambda args: (
        args.router_policy in ("manual", "consistent_hashing")
    ), ("sglang_routing_key",)),
    FlagDependency("--eval-interval", lambda args: args.eval_interval is not None, (
        "eval_prompt_data", "eval_config", "eval_function_path", "skip_eval_before_train", "eval_input_key",
        "eval_label_key", "eval_tool_key", "n_samples_per_eval_prompt", "eval_temperature", "eval_top_p", "eval_top_k",
        "eval_max_response_len", "eval_max_prompt_len", "eval_min_new_tokens", "eval_reward_key",
        "custom_eval_rollout_log_function_path",
    )),
)  # fmt: skip


def check(args: Namespace) -> None:
    """Warn of flags given without the one they belong to; refuse trackers that have no place to write to."""
    given: frozenset[str] = args.explicit_flags
    flags = {flag.dest: flag for flag in slime_flags()}
    for dependency in DEPENDENCIES:
        alone = [flags[name] for name in dependency.names if name in given]
        alone = [flag for flag in alone if getattr(args, flag.dest) != flag.default]
        if alone and not dependency.present(args):
            options = " and ".join(flag.option for flag in alone)
            verb = "has" if len(alone) == 1 else "have"
            diagnostics.warn(args, f"{options} {verb} no effect without {dependency.option}")
    if "micro_batch_size" in given and args.micro_batch_size != 1 and args.use_dynamic_batch_size:
        diagnostics.warn(
            args, f"--micro-batch-size {args.micro_batch_size} has no effect with --use-dynamic-batch-size"
        )
    if args.use_tensorboard and args.tb_project_name is None and not os.environ.get("TENSORBOARD_DIR"):
        raise ArgumentError(
            "--use-tensorboard needs --tb-project-name NAME or the environment variable TENSORBOARD_DIR"
        )
