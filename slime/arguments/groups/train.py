"""The training process: backend, memory, hooks into Megatron, checkpoints and the optimizer."""

from __future__ import annotations

from typing import Any, Literal

from slime.arguments.group import ArgumentGroup, DottedPath, Pattern, flag
from slime.arguments.traits import Contract, Needs, Template


class Train(ArgumentGroup):
    """The training process."""

    title = "training process"

    train_backend: Literal["megatron"] = flag("megatron", "what trains; there is one")
    fp32: bool = flag(False, "train in fp32 on GPUs too (without --fp16, --bf16 or --fp32: bf16 on GPUs, fp32 on CPUs)")
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag(
        "fla",
        "kernels of gated delta nets (Qwen3-Next, Qwen3.5) on CUDA, of flash-linear-attention or flash-qla; torch's "
        "operations where the package of 'fla' is not installed",
    )
    train_env_vars: dict[str, str] = flag(
        {}, "JSON object of extra environment variables of training processes; they win over slime's own"
    )
    custom_model_provider_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that builds the model; default: a GPT model described by the model flags",
    )
    recompute_loss_function: bool = flag(
        False, "recompute the loss in the backward pass instead of keeping its activations"
    )
    log_probs_chunk_size: int = flag(
        -1, "largest number of tokens per chunk when log-probs are computed from logits; -1: what fits 256 MiB (CPU: 4)"
    )
    only_train_params_name_list: list[Pattern] | None = flag(
        None,
        "regular expressions searched in parameter names; what none matches is frozen. Default: everything is trained",
    )
    freeze_params_name_list: list[Pattern] | None = flag(
        None, "regular expressions searched in parameter names; what one matches is frozen"
    )
    freeze_indexer: bool = flag(
        False,
        "freeze the indexer of sparse-attention layers",
        inert="the indexer is never trained: the loss has no gradient by the choice of keys; leave it out",
    )
    train_vision_tower: bool = flag(
        False,
        "train the vision tower of a vision-language model, too; without this it stays as it is in --hf-checkpoint",
        silenced_by=("no trainer",),
    )
    allgather_cp: bool = flag(
        False,
        "contiguous context-parallel layout with gathered keys (sparse-attention models)",
        inert="context-parallel ranks gather the keys of every sequence in any case, each having a zig-zag part of its "
        "queries; leave it out",
    )
    quantization_aware_training: bool = flag(
        False, "compute with weights rounded as --hf-checkpoint stores them, and apply the gradients to the exact ones"
    )
    release_train: bool = flag(
        False,
        "end the training processes while engines generate and restart them from the saved checkpoint",
        silenced_by=("no trainer",),
    )
    data_pad_size_multiplier: int = flag(
        128, "pad the packed tokens of a micro-batch to a multiple of this x --tensor-model-parallel-size", ge=1
    )
    padded_vocab_size: int | None = flag(
        None,
        "rows of the embedding; default: --vocab-size rounded up to a multiple of "
        "--make-vocab-size-divisible-by x --tensor-model-parallel-size",
        ge=1,
        follows="vocab_size",
        from_sizes=True,
    )
    trust_remote_code: bool = flag(False, "run the Python code that comes with a Hugging Face checkpoint")


class MegatronHooks(ArgumentGroup):
    """Functions called from the trainer, by dotted path."""

    title = "trainer hooks"

    custom_megatron_init_path: DottedPath | None = flag(
        None,
        "dotted path of a function called once after Megatron is initialized",
        hook=Contract("fn(args)", 1, caller="trainer"),
    )
    custom_megatron_before_log_prob_hook_path: DottedPath | None = flag(
        None,
        "dotted path of a function called before every log-prob pass",
        hook=Contract("fn(args, model, store_prefix)", 3, caller="trainer"),
    )
    custom_megatron_before_train_step_hook_path: DottedPath | None = flag(
        None,
        "dotted path of a function called before every training step",
        hook=Contract("fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)", 6, caller="trainer"),
    )
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None, "decoder layers whose linears run the engines' block-FP8 forward pass in training", not_yet=True
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(
        None, "endings of the names of modules, in those layers, that do", not_yet=True
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(
        None, "decoder layers whose experts run the engines' block-FP8 forward pass in training", not_yet=True
    )
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(
        None, "endings of the names of modules, in those layers, that do", not_yet=True
    )


class Checkpoint(ArgumentGroup):
    """Checkpoints."""

    title = "checkpoints"

    load: str | None = flag(
        None,
        "actor checkpoint: a directory written by --save, or a Hugging Face checkpoint",
        path="model",
        resolved_by="checkpoints",
    )
    save: str | None = flag(None, "directory to write checkpoints to; also give --save-interval", path="directory")
    save_interval: int | None = flag(None, "save every N rollouts and at the end of every epoch; default: never", ge=1)
    most_recent_k: int = flag(
        -1, "keep the last K checkpoints and remove older ones; -1: keep all", needs="--save-interval", ge=-1
    )
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints after every N rollouts, a multiple of --save-interval, and remove others once there is a "
        "later one (--most-recent-k: K later ones)",
        needs="--save-interval",
        ge=1,
    )
    async_save: bool = flag(False, "write checkpoints in the background, during training", needs="--save")
    no_save_optim: bool = flag(
        False,
        "leave the optimizer state out of checkpoints",
        needs=Needs("--save", lambda args: args.use_stateless_adam),
    )
    save_hf: str | None = flag(
        None,
        "directory template with {rollout_id}: also export the model in Hugging Face format with every save",
        template=Template(("rollout_id",), ("rollout_id",), "exports/{rollout_id}"),
        critic=None,
    )
    ref_load: str | None = flag(
        None,
        "reference model, and first actor weights when --load has none; default: --hf-checkpoint",
        path="model",
        decides_generation=True,
        resolved_by="checkpoints",
    )
    ref_ckpt_step: int | None = flag(None, "step of the checkpoint --ref-load; default: its latest", ge=0)
    unpickle_checkpoints: bool = flag(
        False,
        "read checkpoints of --load and --ref-load whatever their pickles hold, which runs code that they bring; "
        "default: plain values and tensors, anything else is an error",
    )
    megatron_config_path: str | None = flag(None, "YAML file with flags of the roles actor and critic", path="file")
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


class Lora(ArgumentGroup):
    """Low-rank adapters (LoRA)."""

    title = "LoRA"

    lora_rank: int = flag(0, "train adapters of this rank on a frozen model; 0: train the model itself", ge=0)
    lora_alpha: float = flag(32.0, "adapters are scaled by this over --lora-rank", gt=0, needs="--lora-rank")
    lora_target_modules: list[str] = flag(
        ["all-linear"],
        "projections with adapters, by the last part of their Hugging Face names: q_proj up_proj ...; all-linear: all",
        needs="--lora-rank",
    )
    lora_dropout: float = flag(
        0.0, "dropout on the input of adapters while training", ge=0, lt=1, needs="--lora-rank", random=True
    )
    lora_sync: Literal["merged", "adapter"] = flag(
        "merged",
        "what engines are sent; merged: all weights, with the adapters merged into them; adapter: the adapters alone, "
        "while they go on generating",
        needs="--lora-rank",
    )
    lora_adapter_path: str | None = flag(
        None, "directory with an adapter saved by PEFT to start from", path="directory", needs="--lora-rank"
    )
