"""How the rollout manager calls each of its hooks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """``call``: the signature, for messages. The function must take ``positional`` arguments and these ``keywords``; it
    is given what it takes of those ``offered``. A class is also asked for ``methods``. What ``generates`` is
    not called when rollouts are replayed."""

    flag: str
    call: str
    positional: int
    keywords: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    what: str = "a function"
    generates: bool = False


CONTRACTS: dict[str, Contract] = {
    "rollout_function_path": Contract(
        "--rollout-function-path", "fn(args, rollout_id, data_source, evaluation=False)", 3, ("evaluation",)
    ),
    "eval_function_path": Contract(
        "--eval-function-path", "fn(args, rollout_id, data_source, evaluation=False)", 3, ("evaluation",)
    ),
    "data_source_path": Contract(
        "--data-source-path",
        "a class C(args) with get_samples(n), add_samples(groups), save(rollout_id), load(rollout_id=None) and __len__",
        1,
        methods=("get_samples",),
        what="a class",
    ),
    "buffer_filter_path": Contract(
        "--buffer-filter-path", "fn(args, rollout_id, buffer, num_samples)", 4, generates=True
    ),
    "custom_generate_function_path": Contract(
        "--custom-generate-function-path",
        "fn(args, sample, sampling_params[, evaluation])",
        3,
        offered=("evaluation",),
        generates=True,
    ),
    "rollout_sample_hook_path": Contract(
        "--rollout-sample-hook-path",
        "fn(args, sample, *, rollout_id=None, evaluation=False)",
        2,
        offered=("rollout_id", "evaluation"),
        generates=True,
    ),
    "custom_rm_path": Contract(
        "--custom-rm-path",
        "fn(args, sample, **kwargs), or fn(args, samples, **kwargs) with --group-rm",
        2,
        generates=True,
    ),
    "dynamic_sampling_filter_path": Contract(
        "--dynamic-sampling-filter-path", "fn(args, group, **kwargs)", 2, generates=True
    ),
    "rollout_sample_filter_path": Contract("--rollout-sample-filter-path", "fn(args, groups)", 2, generates=True),
    "rollout_all_samples_process_path": Contract(
        "--rollout-all-samples-process-path", "fn(args, all_groups, get_samples)", 3, generates=True
    ),
    "custom_reward_post_process_path": Contract("--custom-reward-post-process-path", "fn(args, samples)", 2),
    "custom_convert_samples_to_train_data_path": Contract(
        "--custom-convert-samples-to-train-data-path", "fn(args, samples)", 2
    ),
    "custom_rollout_log_function_path": Contract(
        "--custom-rollout-log-function-path", "fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time)", 5
    ),
    "custom_engine_scaling_path": Contract(
        "--custom-engine-scaling-path", "fn(args, engines), which returns {model: number of engines}", 2, generates=True
    ),
    "custom_eval_rollout_log_function_path": Contract(
        "--custom-eval-rollout-log-function-path", "fn(rollout_id, args, data, extra_metrics)", 4
    ),
    "sglang_custom_pull_weights_pre_read_hook": Contract(
        "--sglang-custom-pull-weights-pre-read-hook", "fn(source_dir, target_version)", 2
    ),
}
"""By the attribute of the arguments that holds the dotted path (of sample hooks: several)."""

ENVIRONMENT = Contract(
    "--environment-path", "a class C(args, task) with reset, step, format_observation and close", 2, what="a class"
)
"""The classes of ``slime.arguments.files.environments.environments_of``."""
