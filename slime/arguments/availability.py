"""The flags that are declared but whose feature this version does not have yet, and those that can have no effect.

Delete a line (or one value of it) to make a flag available. A run that sets one to anything but its default is refused;
``--dry-run`` lists what would be. Flags of slime <= 0.3.1 and of Megatron that can have no effect warn and say why.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough.megatron import UNREAD
from slime.arguments.passthrough.megatron_table import refused, without_effect

ANY = "any value"

NOT_YET: dict[str, str | tuple[Any, ...]] = {
    # training process
    "qwen_gdn_backend": ANY,
    "freeze_indexer": ANY,
    "allgather_cp": ANY,
    "megatron_deepgemm_forward_layers": ANY,
    "megatron_deepgemm_forward_modules": ANY,
    "megatron_deepgemm_moe_forward_layers": ANY,
    "megatron_deepgemm_moe_forward_modules": ANY,
    # rollout
    "rollout_data_transport": ("nixl",),
    "multimodal_keys": ANY,
    # teacher server
    "teacher_port": ANY,
    "teacher_warmup_port": ANY,
    "teacher_warmup_timeout_s": ANY,
    "teacher_sample_reduction_chunk_size": ANY,
    "teacher_label_reduction_chunk_size": ANY,
    "megatron_server_max_length": ANY,
    "megatron_server_update_timeout_s": ANY,
    "megatron_server_warmup": ANY,
    # Megatron: families and formats that have no weight map or kernel yet
    "fp4": ANY,
    "moe_token_drop_policy": ("position",),
    "experimental_attention_variant": ANY,
    "enable_experimental": ANY,
    "position_embedding_type": ("mrope", "yarn", "relative"),
    # Megatron: other formats of checkpoints
    "ckpt_format": ("zarr", "fsdp_dtensor"),
    # Megatron: what its own training scripts do
    **dict.fromkeys(sorted(refused()), ANY),
}

# Megatron's flags by name or pattern: details of families that are refused above, and features whose other half is
# a training script's (it builds their process groups, wrappers or graphs), which slime does not have.
NOT_YET_MEGATRON: tuple[str, ...] = (
    # mixture of experts: what drops or disturbs tokens routes otherwise in training than in passes before it
    "moe_enable_routing_replay",
    "moe_router_topk_limited_devices",
    "moe_router_padding_for_*",
    "moe_router_force_load_balancing",
    "moe_input_jitter_eps",
    "moe_token_dropping",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_use_legacy_grouped_gemm",
    "moe_latent_size",
    "moe_extended_tp",
    "moe_use_upcycling",
    "moe_upcycling_granularity",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "ep_overlap_early_attn_memory_release",
    "use_fused_weighted_squared_relu",
    # low precision
    "fp4_*",
    "keep_fp8_transpose_cache",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "use_kitchen*",
    "kitchen_attention_backend",
    # sparse and linear attention, state-space models, multimodal positions
    "cache_mla_latents",
    "dsa_*",
    "linear_*",
    "mamba_*",
    "use_mamba_mem_eff_path",
    "is_hybrid_model",
    "mrope_section",
    "mtp_standalone",
    "heterogeneous_block_specs",
    "hetereogenous_dist_checkpoint",
    "qk_clip*",
    "log_max_attention_logit",
    # sharded data parallelism
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "fsdp_*",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "gradient_reduce_div_fusion",
    "suggested_communication_unit_size",
    "preserve_fp32_weights",
    "init_model_with_meta_device",
    # communication and graphs
    "tp_comm_*",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "max_seqlen_per_dp_cp_rank",
    "pipeline_model_parallel_comm_backend",
    "overlap_param_gather_with_optimizer_step",
    "cuda_graph_*",
    "enable_cuda_graph",
    "external_cuda_graph",
    "batch_invariant_mode",
    # optimizer
    "muon_*",
    "log_num_zeros_in_grad",
)

# Variables of trainers that switched on a feature of the patched packages of slime <= 0.3.1, by name or pattern.
NOT_YET_VARIABLES: tuple[str, ...] = (
    "DSA_KV_FP8_QAT",
    "MEGATRON_USE_SGLANG_*",
)

# Layer specifications that have their name only: megatron-core cannot express what they would build.
NOT_YET_SPECS: dict[str, str] = {
    "slime_plugins.models.glm5.glm5": "megatron-core's sparse attention does not take packed sequences",
    "slime_plugins.models.qwen3_5_vl": (
        "megatron-core has no such vision tower; --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec trains the "
        "language model of the same checkpoint"
    ),
}

# Flags that can have no effect -> why, or what to do instead.
_INFERENCE = "it concerns generation with Megatron; engines generate here"
INERT: dict[str, str] = {
    "fp8_param_gather": "weights are kept and gathered in bf16, of which pushes and checkpoints are made",
    "fp8_interval": "TransformerEngine does not read it; leave it out",
    "http_proxy": "set the environment variables http_proxy and no_proxy instead",
    "min_batch_collection_ratio": "it never had an effect; leave it out",
    "cross_entropy_loss_fusion": "slime computes log-probs itself; see --log-probs-chunk-size",
    "cross_entropy_fusion_impl": "slime computes log-probs itself; see --log-probs-chunk-size",
    "apply_residual_connection_post_layernorm": "megatron-core does not read it; leave it out",
    "async_tensor_model_parallel_allreduce": "megatron-core does not read it; leave it out",
    "barrier_with_L1_time": "slime has timers of its own; leave it out",
    "inference_rng_tracker": _INFERENCE,
    "inference_sampling_seed": _INFERENCE,
    "inference_fuse_tp_communication": _INFERENCE,
    "use_inference_optimized_layers": _INFERENCE,
    "flash_decode": _INFERENCE,
    "mlp_chunks_for_prefill": _INFERENCE,
    "symmetric_ar_type": _INFERENCE,
    "sglang_host": "engines bind to loopback, or to the address of their host when the run spans several",
    **without_effect(),
}


def is_available(flag: Flag) -> bool:
    """Whether some value other than the default may be given."""
    if flag.group == UNREAD:
        return False
    if flag.source == "megatron" and any(fnmatchcase(flag.dest, pattern) for pattern in NOT_YET_MEGATRON):
        return False
    return flag.dest not in INERT and NOT_YET.get(flag.dest) != ANY


def refused_values(flag: Flag) -> tuple[Any, ...]:
    """Choices of an available flag that this version does not have yet."""
    entry = NOT_YET.get(flag.dest, ())
    return entry if isinstance(entry, tuple) else ()


def unavailable_messages(values: dict[str, Any], flags: Iterable[Flag]) -> list[str]:
    """One sentence for every given value (attribute -> value) whose feature does not exist yet."""
    messages = []
    variables, spec = values.get("train_env_vars"), values.get("spec")
    if isinstance(variables, dict):  # otherwise the flag's own check refuses it
        messages += [
            f"--train-env-vars {name} is not available yet in this version; leave it out"
            for name, value in variables.items()
            if value != "0" and any(fnmatchcase(str(name), pattern) for pattern in NOT_YET_VARIABLES)
        ]
    if isinstance(spec, list) and spec and spec[0] in NOT_YET_SPECS:
        messages.append(f"--spec {' '.join(spec)} is not available yet in this version: {NOT_YET_SPECS[spec[0]]}")
    for flag in _changed(values, flags):
        value = values[flag.dest]
        if flag.dest in INERT:
            continue
        if not is_available(flag):
            messages.append(f"{flag.option} is not available yet in this version; leave it out")
        elif value in refused_values(flag):
            others = [c for c in flag.choices or () if c not in refused_values(flag)]
            way_out = f"use {' or '.join(map(str, others))}" if others else "leave it out"
            messages.append(f"{flag.option} {value} is not available yet in this version; {way_out}")
    return messages


def inert_messages(values: dict[str, Any], flags: Iterable[Flag]) -> list[str]:
    """One sentence for every given value (attribute -> value) that can have no effect."""
    return [
        f"{flag.option} has no effect: {INERT[flag.dest]}" for flag in _changed(values, flags) if flag.dest in INERT
    ]


def _changed(values: dict[str, Any], flags: Iterable[Flag]) -> list[Flag]:
    return [flag for flag in flags if flag.dest in values and values[flag.dest] != flag.default]
