"""slime's own flags as attributes with their types.

Written by `python -m tools.gen_args` from slime/arguments/groups; change it there.
"""

from __future__ import annotations

from typing import Any, Literal


class OwnArgs:
    """slime's own flags."""

    # cluster and placement
    actor_num_nodes: int
    actor_num_gpus_per_node: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int
    num_gpus_per_node: int
    colocate: bool
    offload: bool
    offload_train: bool
    offload_rollout: bool
    distributed_backend: str
    distributed_timeout_minutes: int
    ray_address: str | None
    placement_timeout: float
    engine_ready_timeout: float
    drain_timeout: float
    http_proxy: str | None
    use_distributed_post: bool

    # training process
    train_backend: Literal["megatron"]
    fp32: bool
    qwen_gdn_backend: Literal["fla", "flashqla"]
    train_env_vars: dict[str, str]
    custom_model_provider_path: str | None
    recompute_loss_function: bool
    log_probs_chunk_size: int
    only_train_params_name_list: list[str] | None
    freeze_params_name_list: list[str] | None
    freeze_indexer: bool
    train_vision_tower: bool
    allgather_cp: bool
    quantization_aware_training: bool
    release_train: bool
    data_pad_size_multiplier: int
    padded_vocab_size: int
    trust_remote_code: bool

    # LoRA
    lora_rank: int
    lora_alpha: float
    lora_target_modules: list[str]
    lora_dropout: float
    lora_sync: Literal["merged", "adapter"]
    lora_adapter_path: str | None

    # rollout generation
    hf_checkpoint: str
    model_name: str | None
    rollout_function_path: str
    rollout_temperature: float
    rollout_top_p: float
    rollout_top_k: int
    rollout_max_context_len: int | None
    rollout_max_prompt_len: int | None
    rollout_max_response_len: int | None
    rollout_skip_special_tokens: bool
    rollout_stop: list[str] | None
    rollout_stop_token_ids: list[int] | None
    rollout_shuffle: bool
    rollout_seed: int
    over_sampling_batch_size: int
    dynamic_sampling_filter_path: str | None
    partial_rollout: bool
    mask_offpolicy_in_partial_rollout: bool
    max_staleness: int | None
    custom_generate_function_path: str | None
    rollout_sample_hook_path: list[str]
    custom_rollout_log_function_path: str | None
    custom_eval_rollout_log_function_path: str | None
    buffer_filter_path: str | None
    rollout_data_postprocess_path: str | None
    rollout_data_transport: Literal["object-store", "nixl"]
    rollout_sample_filter_path: str | None
    rollout_all_samples_process_path: str | None
    rollout_buffer_url: str | None
    fetch_trajectory_retry_times: int
    min_batch_collection_ratio: float
    rollout_task_type: str
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"]
    rollout_request_timeout: float
    max_prompt_attempts: int
    service_outage_timeout: float
    sglang_router_ip: str
    sglang_router_port: int
    sglang_router_package: Literal["auto", "smg", "sglang_router"]
    sglang_router_request_timeout_secs: int
    sglang_routing_key: Literal["session", "group"]
    sglang_server_concurrency: int
    prefill_num_servers: int | None
    sglang_config: str | None

    # environments
    environment_path: list[str] | None
    environment_config: str | None

    # data
    num_rollout: int
    num_epoch: int | None
    rollout_global_dataset: bool
    data_source_path: str
    prompt_data: str | None
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    input_key: str
    label_key: str | None
    multimodal_keys: dict[str, str] | None
    metadata_key: str
    tool_key: str
    start_rollout_id: int

    # batches
    rollout_batch_size: int
    n_samples_per_prompt: int
    global_batch_size: int
    num_steps_per_rollout: int | None
    micro_batch_size: int
    balance_data: bool
    balance_by_flops: bool
    use_dynamic_batch_size: bool
    max_tokens_per_gpu: int | None
    log_probs_max_tokens_per_gpu: int | None

    # evaluation
    eval_function_path: str
    eval_interval: int | None
    eval_prompt_data: list[str] | None
    eval_config: str | None
    skip_eval_before_train: bool
    eval_input_key: str | None
    eval_label_key: str | None
    eval_tool_key: str | None
    n_samples_per_eval_prompt: int
    eval_temperature: float | None
    eval_top_p: float | None
    eval_top_k: int | None
    eval_max_response_len: int | None
    eval_max_prompt_len: int | None
    eval_min_new_tokens: int | None
    eval_max_context_len: int | None

    # reward
    rm_type: str | None
    reward_key: str | None
    eval_reward_key: str | None
    group_rm: bool
    rm_url: str | None
    reward_workers: int | None
    reward_time_limit: float
    reward_timeout: float | None
    reward_failure_tolerance: float
    custom_rm_path: str | None
    custom_reward_post_process_path: str | None
    custom_convert_samples_to_train_data_path: str | None

    # algorithm
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"]
    custom_loss_function_path: str | None
    advantage_estimator: Literal[
        "grpo",
        "gspo",
        "cispo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "rloo",
        "ppo",
    ]
    compute_advantages_and_returns: bool
    custom_advantage_function_path: str | None
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    value_clip: float
    num_critic_only_steps: int
    kl_coef: float
    use_kl_loss: bool
    kl_loss_coef: float
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"]
    use_unbiased_kl: bool
    ref_update_interval: int | None
    entropy_coef: float
    gamma: float
    lambd: float
    normalize_advantages: bool
    grpo_std_normalization: bool
    rewards_normalization: bool
    reward_statistics: Literal["trajectories", "samples"]
    use_rollout_entropy: bool
    reset_optimizer_states: bool
    use_stateless_adam: bool
    keep_old_actor: bool

    # off-policy corrections
    use_rollout_logprobs: bool
    use_tis: bool
    tis_clip: float
    tis_clip_low: float
    custom_tis_function_path: str | None
    custom_pg_loss_reducer_function_path: str | None
    pg_loss_reducer: Literal["rollout_mean", "turn_mean", "constant_length"]
    pg_loss_length: int
    get_mismatch_metrics: bool
    mismatch_alarm_threshold: float
    mismatch_stop_threshold: float | None
    use_routing_replay: bool
    use_rollout_routing_replay: bool
    use_opsm: bool
    opsm_delta: float

    # optimizer
    lr: float
    clip_grad: float
    calculate_per_token_loss: bool

    # checkpoints
    load: str
    save: str | None
    save_interval: int | None
    most_recent_k: int
    save_retain_interval: int | None
    async_save: bool
    no_save_optim: bool
    save_hf: str | None
    ref_load: str
    ref_ckpt_step: int | None
    unpickle_checkpoints: bool
    megatron_config_path: str | None
    critic_overrides: dict[str, Any]
    seed: int

    # weight synchronization
    update_weight_mode: Literal["full", "delta"]
    update_weight_transport: Literal["nccl", "disk", "p2p"]
    update_weight_p2p_backend: Literal["nixl", "mooncake"]
    update_weight_buffer_size: int
    update_weights_interval: int
    update_weight_disk_dir: str
    update_weight_disk_keep_files: bool
    update_weight_local_checkpoint_dir: str | None
    update_weight_delta_encoding: Literal["xor", "overwrite"]
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"]
    update_weight_delta_full_interval: int
    custom_update_weight_post_write_path: str | None
    sglang_custom_pull_weights_pre_read_hook: str | None
    check_weight_update_equal: bool
    weight_sync_timeout: float
    weight_sync_pause_mode: Literal["auto", "abort", "retract", "in_place"]

    # logging
    run_dir: str
    use_wandb: bool
    wandb_mode: Literal["online", "offline", "disabled"] | None
    wandb_dir: str | None
    wandb_key: str | None
    wandb_host: str | None
    wandb_team: str | None
    wandb_group: str | None
    wandb_project: str | None
    wandb_run_id: str | None
    wandb_random_suffix: bool
    wandb_always_use_train_step: bool
    log_multi_turn: bool
    log_passrate: bool
    log_correct_samples: bool
    log_reward_category: str | None
    use_tensorboard: bool
    tb_project_name: str | None
    tb_experiment_name: str | None

    # configuration
    config: str | None
    dump_config: str | None
    dry_run: Literal["plan", "full"] | None
    gpu_memory_gb: float | None
    custom_config_path: str | None
    custom_arguments_path: str | None
    ignore_unknown_flags: bool

    # debugging
    debug_rollout_only: bool
    debug_train_only: bool
    skip_first_look: bool
    save_debug_rollout_data: str | None
    load_debug_rollout_data: str | None
    load_debug_rollout_data_subsample: float | None
    load_forge_rollout_data: str | None
    save_debug_train_data: str | None
    dump_details: str | None

    # trainer hooks
    custom_megatron_init_path: str | None
    custom_megatron_before_log_prob_hook_path: str | None
    custom_megatron_before_train_step_hook_path: str | None
    megatron_deepgemm_forward_layers: list[int] | None
    megatron_deepgemm_forward_modules: list[str] | None
    megatron_deepgemm_moe_forward_layers: list[int] | None
    megatron_deepgemm_moe_forward_modules: list[str] | None

    # fault tolerance
    use_fault_tolerance: bool
    rollout_health_check_interval: float
    rollout_health_check_timeout: float
    rollout_health_check_first_wait: float
    rollout_health_check_failures: int

    # elastic engines
    rollout_min_engines: int
    rollout_max_engines: int | None
    custom_engine_scaling_path: str | None
    engine_scaling_interval: float

    # external engines
    rollout_external_engine_addrs: list[str] | None

    # on-policy distillation
    use_opd: bool
    opd_type: Literal["sglang", "megatron"] | None
    opd_kl_coef: float
    opd_teacher_load: str | None
    opd_teacher_ckpt_step: int | None

    # multi-token prediction
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float
    enable_mtp_training: bool

    # profiling
    use_pytorch_profiler: bool
    profile_step_start: int
    profile_step_end: int
    profile_ranks: list[int]
    tensorboard_dir: str | None
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]]
    memory_snapshot_dir: str
    memory_snapshot_path: str
    memory_snapshot_num_steps: int | None
    memory_recorder: Literal["torch", "memray"]
    record_memory_history: bool

    # continuous integration
    ci_test: bool
    ci_disable_kl_checker: bool
    ci_train_rollout_logprob_abs_diff_threshold: float
    ci_save_grad_norm: str | None
    ci_load_grad_norm: str | None

    # log-prob server
    teacher_port: int
    teacher_warmup_port: int
    teacher_warmup_timeout_s: int
    teacher_sample_reduction_chunk_size: int
    teacher_label_reduction_chunk_size: int
    megatron_server_max_length: int
    megatron_server_update_timeout_s: float
    megatron_server_warmup: bool | None
