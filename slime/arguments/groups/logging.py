"""Metrics, trackers and the run directory."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag


class Logging(ArgumentGroup):
    """Logging."""

    title = "logging"

    run_dir: str | None = flag(
        None, "directory of metrics, logs, samples and configuration; default: runs/<time>-<pid>"
    )
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(None, "overrides $WANDB_MODE")
    wandb_dir: str | None = flag(None, "directory of W&B files")
    wandb_key: str | None = flag(None, "API key")
    wandb_host: str | None = flag(None, "address of the W&B server")
    wandb_team: str | None = flag(None, "entity")
    wandb_group: str | None = flag(None, "group of runs")
    wandb_project: str | None = flag(None, "project")
    wandb_run_id: str | None = flag(None, "id of the run to continue")
    wandb_random_suffix: bool = flag(True, "no random suffix on the group name", option="--disable-wandb-random-suffix")
    wandb_always_use_train_step: bool = flag(False, "count everything in train steps instead of rollouts")
    log_multi_turn: bool = flag(False, "log metrics of multi-turn samples")
    log_passrate: bool = flag(False, "log pass@k of the rollout")
    log_correct_samples: bool = flag(False, "log metrics of correct samples apart")
    log_reward_category: str | None = flag(None, "key of reward objects to count by")
    use_tensorboard: bool = flag(False, "log to TensorBoard (--tb-project-name or $TENSORBOARD_DIR)")
    tb_project_name: str | None = flag(None, "TensorBoard project")
    tb_experiment_name: str | None = flag(None, "TensorBoard experiment; default: the time")
