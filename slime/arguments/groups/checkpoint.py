"""Checkpoints and the optimiser's learning rate."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag


class Checkpoint(ArgumentGroup):
    """Checkpoints."""

    title = "checkpoints"

    load: str | None = flag(None, "actor checkpoint: a directory written by --save, or a Hugging Face checkpoint")
    save: str | None = flag(None, "directory for checkpoints")
    save_interval: int | None = flag(None, "save every N rollouts and at the end of every epoch", ge=1)
    async_save: bool = flag(False, "write checkpoints in the background")
    no_save_optim: bool = flag(False, "leave the optimiser state out of checkpoints")
    save_hf: str | None = flag(None, "directory template with {rollout_id}: a Hugging Face export with every save")
    ref_load: str | None = flag(
        None, "reference model, and first actor weights when --load has none; default: --hf-checkpoint"
    )
    ref_ckpt_step: int | None = flag(None, "step of the reference checkpoint", ge=0)
    megatron_config_path: str | None = flag(None, "YAML file of per-role overrides")
    seed: int = flag(1234, "seed of training")


class Optimizer(ArgumentGroup):
    """Values whose defaults differ from Megatron's; the other optimiser flags are Megatron's own."""

    title = "optimiser"

    lr: float = flag(1e-6, "learning rate", ge=0)
    clip_grad: float = flag(1.0, "largest gradient norm; 0: no clipping", ge=0)
    calculate_per_token_loss: bool = flag(False, "mean over tokens instead of mean over samples")
