"""The one table of flags that are declared but whose feature this version does not have yet.

Delete a line (or one value of it) to make a flag available. A run that sets one to anything but its default is
refused; none is ever ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag

ANY = "any value"

NOT_YET: dict[str, str | tuple[Any, ...]] = {
    # cluster
    "release_train": ANY,
    "use_distributed_post": ANY,
    "rollout_external_engine_addrs": ANY,
    # training process
    "qwen_gdn_backend": ANY,
    "freeze_indexer": ANY,
    "allgather_cp": ANY,
    "megatron_deepgemm_forward_layers": ANY,
    "megatron_deepgemm_forward_modules": ANY,
    "megatron_deepgemm_moe_forward_layers": ANY,
    "megatron_deepgemm_moe_forward_modules": ANY,
    # rollout
    "rollout_top_p": ANY,  # needs nucleus replay in the trainer
    "rollout_data_transport": ("nixl",),
    "rollout_buffer_url": ANY,
    "fetch_trajectory_retry_times": ANY,
    "rollout_task_type": ANY,
    "prefill_num_servers": ANY,
    "sglang_config": ANY,
    "multimodal_keys": ANY,
    # algorithm
    "advantage_estimator": ("ppo",),
    "value_clip": ANY,
    "num_critic_only_steps": ANY,
    "use_stateless_adam": ANY,
    "keep_old_actor": ANY,
    "use_routing_replay": ANY,
    "use_rollout_routing_replay": ANY,
    "use_opd": ANY,
    "opd_type": ANY,
    "opd_kl_coef": ANY,
    "opd_teacher_load": ANY,
    "opd_teacher_ckpt_step": ANY,
    "mtp_num_layers": ANY,
    "mtp_loss_scaling_factor": ANY,
    "enable_mtp_training": ANY,
    # checkpoints
    "async_save": ANY,
    "megatron_config_path": ANY,
    # weight synchronisation
    "update_weight_mode": ("delta",),
    "update_weight_transport": ("disk",),
    "update_weight_disk_dir": ANY,
    "update_weight_disk_keep_files": ANY,
    "update_weight_local_checkpoint_dir": ANY,
    "update_weight_delta_encoding": ANY,
    "update_weight_delta_checksum": ANY,
    "custom_update_weight_post_write_path": ANY,
    # fault tolerance
    "use_fault_tolerance": ANY,
    "rollout_health_check_interval": ANY,
    "rollout_health_check_timeout": ANY,
    "rollout_health_check_first_wait": ANY,
    # logging, profiling
    "log_correct_samples": ANY,
    "profile_target": ANY,
    "memory_snapshot_dir": ANY,
    "memory_snapshot_num_steps": ANY,
    "memory_recorder": ANY,
    "record_memory_history": ANY,
    "load_forge_rollout_data": ANY,
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
    "fp8": ANY,
    "fp4": ANY,
    "num_experts": ANY,
    "multi_latent_attention": ANY,
    "experimental_attention_variant": ANY,
    "enable_experimental": ANY,
    "add_position_embedding": ANY,
    "use_gated_attention": ANY,
    "post_self_attn_layernorm": ANY,
    "post_mlp_layernorm": ANY,
}

# Flags of slime <= 0.3.1 that did nothing there: refused with the way out instead of ignored.
INERT: dict[str, str] = {
    "http_proxy": "set the environment variables http_proxy and no_proxy instead",
    "min_batch_collection_ratio": "it never had an effect; leave it out",
}


def is_available(flag: Flag) -> bool:
    """Whether some value other than the default may be given."""
    return flag.dest not in INERT and NOT_YET.get(flag.dest) != ANY


def refused_values(flag: Flag) -> tuple[Any, ...]:
    """Choices of an available flag that this version does not have yet."""
    entry = NOT_YET.get(flag.dest, ())
    return entry if isinstance(entry, tuple) else ()


def refuse_unavailable(values: dict[str, Any], flags: Iterable[Flag]) -> None:
    """Raise ``ArgumentError`` for every given value (attribute -> value) whose feature does not exist yet."""
    messages = []
    for flag in flags:
        if flag.dest not in values or values[flag.dest] == flag.default:
            continue
        value = values[flag.dest]
        if flag.dest in INERT:
            messages.append(f"{flag.option} has no effect: {INERT[flag.dest]}")
        elif not is_available(flag):
            messages.append(f"{flag.option} is not available yet in this version; leave it out")
        elif value in refused_values(flag):
            others = [c for c in flag.choices or () if c not in refused_values(flag)]
            way_out = f"use one of {', '.join(map(str, others))}" if others else "leave it out"
            messages.append(f"{flag.option} {value} is not available yet in this version; {way_out}")
    if messages:
        raise ArgumentError("\n".join(messages))
