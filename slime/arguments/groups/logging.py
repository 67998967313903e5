"""Metrics, trackers and the run directory."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag


class Logging(ArgumentGroup):
    """Logging."""

    title = "logging"
    read_by = "run"

    run_dir: str | None = flag(
        None, "directory of metrics, logs, samples and configuration; default: runs/<time>-<pid>", path="directory"
    )
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "where Weights & Biases logs; default: $WANDB_MODE, else online", needs="--use-wandb"
    )
    wandb_dir: str | None = flag(
        None,
        "directory of the files of Weights & Biases; default: its own (./wandb)",
        path="directory",
        needs="--use-wandb",
    )
    wandb_key: str | None = flag(
        None, "API key of Weights & Biases; default: $WANDB_API_KEY or the login of this machine", needs="--use-wandb"
    )
    wandb_host: str | None = flag(
        None, "address of the Weights & Biases server; default: the public one", needs="--use-wandb"
    )
    wandb_team: str | None = flag(None, "team or user (entity) on Weights & Biases", needs="--use-wandb")
    wandb_group: str | None = flag(
        None, "name under which Weights & Biases groups runs; default: none", needs="--use-wandb"
    )
    wandb_project: str | None = flag(None, "project on Weights & Biases; default: slime", needs="--use-wandb")
    wandb_run_id: str | None = flag(
        None, "id of the run on Weights & Biases to continue; default: a new one", needs="--use-wandb"
    )
    wandb_random_suffix: bool = flag(
        True,
        "no random suffix on the name of --wandb-group",
        option="--disable-wandb-random-suffix",
        needs="--use-wandb",
    )
    wandb_always_use_train_step: bool = flag(
        False, "count rollouts and evaluations by optimizer steps too, instead of by rollouts"
    )
    log_multi_turn: bool = flag(
        False,
        "log turns, and response lengths with and without the tokens that an environment wrote",
        read_by="trainers",
    )
    log_passrate: bool = flag(
        False, "log pass@k: how often one of k responses to a prompt has the reward 1", read_by="trainers"
    )
    log_correct_samples: bool = flag(
        False, "log length and certainty of the samples whose raw reward is 1 as rollout/correct_*", read_by="trainers"
    )
    log_reward_category: str | None = flag(None, "key of reward objects; samples are counted by its values")
    use_tensorboard: bool = flag(False, "log to TensorBoard; needs --tb-project-name or $TENSORBOARD_DIR")
    tb_project_name: str | None = flag(
        None,
        "TensorBoard writes to tensorboard_log/<this>/<experiment>, or to $TENSORBOARD_DIR",
        needs="--use-tensorboard",
    )
    tb_experiment_name: str | None = flag(
        None, "last part of TensorBoard's directory; default: the time", needs="--use-tensorboard"
    )
