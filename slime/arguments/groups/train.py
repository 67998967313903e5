"""The training process: backend, memory, micro-batching of the loss, hooks into Megatron."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath, Pattern


class Train(ArgumentGroup):
    """The training process."""

    title = "training process"

    train_backend: Literal["megatron"] = flag("megatron", "training backend")
    fp32: bool = flag(False, "train in fp32 on GPUs too (without --fp16, --bf16 or --fp32: bf16 on GPUs, fp32 on CPUs)")
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag("fla", "kernels of gated-delta-net layers")
    train_env_vars: dict[str, str] = flag(
        {}, "JSON object of extra environment variables of training processes; they win over slime's own"
    )
    custom_model_provider_path: DottedPath | None = flag(None, "dotted path of a function that builds the model")
    recompute_loss_function: bool = flag(
        False, "recompute the loss in the backward pass instead of keeping its activations"
    )
    log_probs_chunk_size: int = flag(-1, "tokens per chunk when log-probs are computed; -1: all at once")
    only_train_params_name_list: list[Pattern] | None = flag(
        None, "regular expressions; every parameter that none matches is frozen"
    )
    freeze_params_name_list: list[Pattern] | None = flag(None, "regular expressions of parameters to freeze")
    freeze_indexer: bool = flag(False, "freeze the indexer of sparse-attention layers")
    allgather_cp: bool = flag(False, "contiguous context-parallel layout with gathered keys (sparse-attention models)")
    release_train: bool = flag(False, "end the training processes during rollouts and restart them from the checkpoint")
    data_pad_size_multiplier: int = flag(
        128, "packed token streams are padded to a multiple of tensor-parallel size x this", ge=1
    )
    padded_vocab_size: int | None = flag(None, "explicit padded vocabulary; default: derived from --vocab-size", ge=1)
    trust_remote_code: bool = flag(False, "run the Python code that comes with a Hugging Face checkpoint")


class MegatronHooks(ArgumentGroup):
    """Functions called from the trainer, by dotted path."""

    title = "trainer hooks"

    custom_megatron_init_path: DottedPath | None = flag(None, "called once after Megatron is initialised")
    custom_megatron_before_log_prob_hook_path: DottedPath | None = flag(None, "called before every log-prob pass")
    custom_megatron_before_train_step_hook_path: DottedPath | None = flag(None, "called before every training step")
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None, "decoder layers whose linears run the block-FP8 forward of the engines"
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(None, "module-name suffixes of those linears")
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(None, "the same for expert layers")
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(None, "module-name suffixes of those experts")
