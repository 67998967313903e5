"""Checkpoints and the optimizer's learning rate."""

from __future__ import annotations

from typing import Any

from slime.arguments.group import ArgumentGroup, flag


class Checkpoint(ArgumentGroup):
    """Checkpoints."""

    title = "checkpoints"

    load: str | None = flag(None, "actor checkpoint: a directory written by --save, or a Hugging Face checkpoint")
    save: str | None = flag(None, "directory to write checkpoints to; also give --save-interval")
    save_interval: int | None = flag(None, "save every N rollouts and at the end of every epoch; default: never", ge=1)
    async_save: bool = flag(False, "write checkpoints in the background while training goes on")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    save_hf: str | None = flag(
        None, "directory template with {rollout_id}: also export the model in Hugging Face format with every save"
    )
    ref_load: str | None = flag(
        None, "reference model, and first actor weights when --load has none; default: --hf-checkpoint"
    )
    ref_ckpt_step: int | None = flag(None, "step of the checkpoint --ref-load; default: its latest", ge=0)
    megatron_config_path: str | None = flag(None, "YAML file with flags of the roles actor and critic")
    critic_overrides: dict[str, Any] = flag(
        {}, "attributes of the arguments and their values for the critic; --megatron-config-path wins"
    )
    seed: int = flag(1234, "seed of training", ge=1)


class Optimizer(ArgumentGroup):
    """Values whose defaults differ from Megatron's; the other optimizer flags are Megatron's own."""

    title = "optimizer"

    lr: float = flag(1e-6, "learning rate", ge=0)
    clip_grad: float = flag(1.0, "largest norm of the gradient, which is scaled down to it; 0: no limit", ge=0)
    calculate_per_token_loss: bool = flag(
        False, "mean of the loss over all tokens of a step; default: over the tokens of each sample, then over samples"
    )
