"""The training process: backend, memory, micro-batching of the loss, hooks into Megatron."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, DottedPath, Pattern, flag


class Train(ArgumentGroup):
    """The training process."""

    title = "training process"

    train_backend: Literal["megatron"] = flag("megatron", "what trains; there is one")
    fp32: bool = flag(False, "train in fp32 on GPUs too (without --fp16, --bf16 or --fp32: bf16 on GPUs, fp32 on CPUs)")
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag(
        "fla", "kernels of gated-delta-net layers (Qwen3-Next, Qwen3.5)"
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
    freeze_indexer: bool = flag(False, "freeze the indexer of sparse-attention layers")
    allgather_cp: bool = flag(False, "contiguous context-parallel layout with gathered keys (sparse-attention models)")
    release_train: bool = flag(
        False, "end the training processes while engines generate and restart them from the saved checkpoint"
    )
    data_pad_size_multiplier: int = flag(
        128, "pad the packed tokens of a micro-batch to a multiple of this x --tensor-model-parallel-size", ge=1
    )
    padded_vocab_size: int | None = flag(
        None,
        "rows of the embedding; default: --vocab-size rounded up to a multiple of "
        "--make-vocab-size-divisible-by x --tensor-model-parallel-size",
        ge=1,
    )
    trust_remote_code: bool = flag(False, "run the Python code that comes with a Hugging Face checkpoint")


class MegatronHooks(ArgumentGroup):
    """Functions called from the trainer, by dotted path."""

    title = "trainer hooks"

    custom_megatron_init_path: DottedPath | None = flag(
        None, "dotted path of a function called once after Megatron is initialized"
    )
    custom_megatron_before_log_prob_hook_path: DottedPath | None = flag(
        None, "dotted path of a function called before every log-prob pass"
    )
    custom_megatron_before_train_step_hook_path: DottedPath | None = flag(
        None, "dotted path of a function called before every training step"
    )
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None, "decoder layers whose linears run the engines' block-FP8 forward pass in training"
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(
        None, "endings of the names of modules, in those layers, that do"
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(
        None, "decoder layers whose experts run the engines' block-FP8 forward pass in training"
    )
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(
        None, "endings of the names of modules, in those layers, that do"
    )
