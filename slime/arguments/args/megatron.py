"""Megatron's flags as attributes with their types.

Written by `python -m tools.gen_args` from slime/arguments/passthrough; change it there.
"""

from __future__ import annotations


class MegatronArgs:
    """Megatron's flags."""

    # Megatron: model
    norm_epsilon: float
    apply_layernorm_1p: bool
    swiglu: bool
    squared_relu: bool
    init_method_xavier_uniform: bool
    group_query_attention: bool
    untie_embeddings_and_output_weights: bool
    vocab_size: int | None
    make_vocab_size_divisible_by: int
    max_position_embeddings: int
    seq_length: int
    position_embedding_type: str
    use_rotary_position_embeddings: bool
    add_position_embedding: bool
    rotary_base: int
    rotary_percent: float
    rotary_seq_len_interpolation_factor: int | None
    use_rope_scaling: bool
    rope_scaling_factor: float
    rope_type: str
    q_lora_rank: int | None
    kv_lora_rank: int
    rotary_scaling_factor: float
    fp8_param_gather: bool
    num_experts: int | None
    spec: list[str] | None
    attention_softmax_in_fp32: bool
    use_gated_attention: bool
    post_self_attn_layernorm: bool
    post_mlp_layernorm: bool
    enable_experimental: bool
    masked_softmax_fusion: bool
    bias_gelu_fusion: bool
    bias_swiglu_fusion: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    persist_layer_norm: bool
    recompute_activations: bool
    max_seqlen_per_dp_cp_rank: int | None
    moe_extended_tp: bool
    perform_initialization: bool
    use_cpu_initialization: bool | None
    fp16: bool
    bf16: bool
    deterministic_mode: bool
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: str
    ep_overlap_early_attn_memory_release: bool
    mtp_standalone: bool
    cpu_offloading: bool
    cpu_offloading_num_layers: int
    cpu_offloading_activations: bool
    cpu_offloading_weights: bool
    cpu_offloading_double_buffering: bool
    barrier_with_L1_time: bool
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    attention_backend: str
    softmax_scale: float | None
    softmax_type: str
    num_query_groups: int
    ffn_hidden_size: int
    kv_channels: int
    hidden_dropout: float
    attention_dropout: float
    fp32_residual_connection: bool
    apply_residual_connection_post_layernorm: bool
    add_bias_linear: bool
    add_qkv_bias: bool
    activation_func_fp8_input_store: bool
    glu_linear_offset: float
    activation_func_clamp_value: float | None
    rotary_interleaved: bool
    window_size: int | list[int] | None
    window_attn_skip_freq: int | list[int] | None
    normalization: str
    qk_layernorm: bool
    qk_l2_norm: bool
    qk_clip: bool
    qk_clip_alpha: float
    qk_clip_threshold: float
    log_max_attention_logit: bool
    attention_output_gate: bool
    test_mode: bool
    multi_latent_attention: bool
    no_rope_freq: int | list[int] | None
    experimental_attention_variant: str | None
    dsa_indexer_n_heads: int | None
    dsa_indexer_head_dim: int | None
    dsa_indexer_topk: int | None
    dsa_indexer_loss_coeff: float | None
    dsa_indexer_use_sparse_loss: bool
    linear_attention_freq: int | list[int] | None
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    init_method_std: float
    embedding_init_method_std: float | None
    init_model_with_meta_device: bool
    apply_query_key_layer_scaling: bool
    disable_bf16_reduced_precision_matmul: bool
    memory_efficient_layer_norm: bool
    use_fused_weighted_squared_relu: bool
    fused_single_qkv_rope: bool
    recompute_granularity: str | None
    recompute_method: str | None
    recompute_num_layers: int | None
    distribute_saved_activations: bool
    recompute_modules: list[str] | None
    fp8: str | None
    fp8_recipe: str
    fp8_quantizer_factory: str | None
    fp8_margin: int
    fp8_interval: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: str
    fp8_dot_product_attention: bool
    fp8_multi_head_attention: bool
    tp_only_amax_red: bool
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    use_kitchen: bool
    use_kitchen_attention: bool
    kitchen_attention_backend: str
    fp4: str | None
    fp4_recipe: str
    fp4_param: bool
    fp4_quantizer_factory: str | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_shared_expert_overlap: bool
    moe_layer_freq: int | list[int]
    moe_ffn_hidden_size: int | None
    moe_router_load_balancing_type: str | list[str]
    moe_router_topk: int
    moe_enable_routing_replay: bool
    moe_router_topk_limited_devices: int | None
    moe_router_padding_for_quantization: bool
    moe_router_padding_for_fp8: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_pre_softmax: bool
    moe_router_topk_scaling_factor: float | None
    moe_router_score_function: str
    moe_router_dtype: str | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_router_force_load_balancing: bool
    moe_grouped_gemm: bool
    moe_use_legacy_grouped_gemm: bool
    moe_aux_loss_coeff: float | list[float]
    moe_z_loss_coeff: float | None
    moe_input_jitter_eps: float | None
    moe_token_dropping: bool
    moe_token_dispatcher_type: str
    moe_enable_deepep: bool
    moe_flex_dispatcher_backend: str
    moe_per_layer_logging: bool
    moe_expert_capacity_factor: float | None
    moe_pad_expert_input_to_capacity: bool
    moe_token_drop_policy: str
    moe_layer_recompute: bool
    moe_permute_fusion: bool
    moe_router_fusion: bool
    moe_apply_probs_on_input: bool
    moe_latent_size: int | None
    moe_deepep_num_sms: int
    moe_hybridep_num_sms: int
    enable_cuda_graph: bool
    cuda_graph_use_single_mempool: bool
    cuda_graph_retain_backward_graph: bool
    cuda_graph_warmup_steps: int
    external_cuda_graph: bool
    cuda_graph_impl: str
    cuda_graph_scope: str | list[str]
    clone_scatter_output_in_embedding: bool
    disable_parameter_transpose_cache: bool
    config_logger_dir: str
    flash_decode: bool
    batch_invariant_mode: bool
    use_te_activation_func: bool
    inference_rng_tracker: bool
    inference_sampling_seed: int
    symmetric_ar_type: str | None
    use_inference_optimized_layers: bool
    mrope_section: list[int] | None
    is_hybrid_model: bool
    mamba_state_dim: int
    mamba_head_dim: int
    mamba_num_groups: int
    mamba_num_heads: int | None
    use_mamba_mem_eff_path: bool
    mlp_chunks_for_prefill: int
    heterogeneous_block_specs: bool
    hetereogenous_dist_checkpoint: bool
    transformer_impl: str
    fine_grained_activation_offloading: bool
    offload_modules: list[str]
    min_offloaded_tensor_size: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    cache_mla_latents: bool

    # Megatron: parallelism
    gradient_accumulation_fusion: bool
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    overlap_p2p_comm: bool
    accumulate_allreduce_grads_in_fp32: bool
    grad_reduce_in_bf16: bool
    check_for_nan_in_loss_and_grad: bool
    align_param_gather: bool
    use_nccl_ub: bool
    ddp_bucket_size: int | None
    ddp_average_in_collective: bool
    ddp_pad_buckets_for_high_nccl_busbw: bool
    ddp_reduce_scatter_with_fp32_accumulation: bool
    use_tp_pp_dp_mapping: bool
    nccl_communicator_config_path: str | None
    data_parallel_random_init: bool
    te_rng_tracker: bool
    tensor_model_parallel_size: int
    pipeline_model_parallel_comm_backend: str | None
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: list[int] | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    async_tensor_model_parallel_allreduce: bool
    tp_comm_overlap: bool
    tp_comm_bulk_wgrad: bool
    tp_comm_bulk_dgrad: bool
    tp_comm_overlap_ag: bool
    tp_comm_overlap_rs: bool
    tp_comm_overlap_rs_dgrad: bool
    tp_comm_split_ag: bool
    tp_comm_atomic_ag: bool
    tp_comm_split_rs: bool
    tp_comm_atomic_rs: bool
    tp_comm_overlap_disable_qkv: bool
    tp_comm_overlap_disable_fc1: bool
    tp_comm_bootstrap_backend: str
    overlap_moe_expert_parallel_comm: bool
    delay_wgrad_compute: bool
    batch_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool
    defer_embedding_wgrad_compute: bool
    wgrad_deferral_limit: int
    overlap_p2p_comm_warmup_flush: bool
    microbatch_group_size_per_vp_stage: int | None
    pipeline_model_parallel_layout: str | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    fp8_wgrad: bool
    cp_comm_type: str | list[str] | None
    inference_fuse_tp_communication: bool
    overlap_grad_reduce: bool
    num_distributed_optimizer_instances: int
    check_for_large_grads: bool
    use_megatron_fsdp: bool
    use_custom_fsdp: bool
    data_parallel_sharding_strategy: str
    gradient_reduce_div_fusion: bool
    suggested_communication_unit_size: int | None
    preserve_fp32_weights: bool
    keep_fp8_transpose_cache: bool
    fsdp_double_buffer: bool
    outer_dp_sharding_strategy: str
    disable_symmetric_registration: bool
    fsdp_manual_registration: bool

    # Megatron: optimizer
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_warmup_fraction: float | None
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_wsd_decay_style: str
    lr_wsd_decay_iters: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool
    optimizer_offload_fraction: float
    main_grads_dtype: str
    main_params_dtype: str
    exp_avg_dtype: str
    exp_avg_sq_dtype: str
    muon_split_qkv: bool
    decoupled_lr: float | None
    decoupled_min_lr: float | None
    weight_decay: float
    apply_wd_to_qk_layernorm: bool
    reuse_grad_buf_for_mxfp8_param_ag: bool
    use_precision_aware_optimizer: bool
    store_param_remainders: bool
    optimizer: str
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    loss_scale_window: float
    hysteresis: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    decoupled_weight_decay: bool
    sgd_momentum: float
    muon_momentum: float
    muon_use_nesterov: bool
    muon_scale_mode: str
    muon_fp32_matmul_prec: str
    muon_num_ns_steps: int
    muon_tp_mode: str
    muon_extra_scale_factor: float
    use_distributed_optimizer: bool
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    optimizer_cpu_offload: bool
    use_torch_optimizer_for_cpu_offload: bool
    overlap_cpu_optimizer_d2h_h2d: bool
    pin_cpu_grads: bool
    pin_cpu_params: bool
    log_num_zeros_in_grad: bool

    # Megatron: run
    ckpt_step: int | None
    ckpt_format: str
    ckpt_fully_parallel_save: bool
    no_load_optim: bool
    no_load_rng: bool
    no_save_rng: bool
    finetune: bool

    # Megatron: training scripts
    data_path: list[str] | None
    train_data_path: list[str] | None
    valid_data_path: list[str] | None
    test_data_path: list[str] | None
    split: str | None
    data_args_path: str | None
    per_split_data_args_path: str | None
    data_cache_path: str | None
    per_dataset_sequences_path: str | None
    object_storage_cache_path: str | None
    s3_cache_path: str | None
    dataloader_type: str | None
    num_workers: int
    num_dataset_builder_threads: int
    encoder_seq_length: int | None
    decoder_seq_length: int | None
    retriever_seq_length: int
    mid_level_dataset_surplus: float
    sample_rate: float
    mask_prob: float
    short_seq_prob: float
    mock_data: bool
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    allow_ambiguous_pad_tokens: bool
    dataloader_fast_cache_load: bool
    dataloader_defer_npy_index_mmap: bool
    mmap_bin_files: bool
    create_attention_mask_in_dataloader: bool
    tokenizer_type: str
    tokenizer_model: str
    tokenizer_metadata: str | None
    tokenizer_special_tokens: list[str] | None
    tokenizer_hf_include_special_tokens: bool
    tokenizer_hf_use_fast: bool
    tokenizer_sentencepiece_legacy: bool
    legacy_tokenizer: bool
    vocab_file: str | None
    merge_file: str | None
    vocab_extra_ids: int
    tiktoken_pattern: str | None
    tiktoken_num_special_tokens: int
    tiktoken_special_tokens: list[str] | None
    use_tokenizer_model_from_checkpoint_args: bool
    log_interval: int
    log_throughput: bool
    log_progress: bool
    log_params_norm: bool
    log_energy: bool
    log_straggler: bool
    log_memory_interval: int | None
    timing_log_level: int
    timing_log_option: str
    disable_straggler_on_startup: bool
    straggler_ctrlr_port: int
    straggler_minmax_count: int
    run_workload_inspector_server: bool
    logging_level: int | None
    tensorboard_log_interval: int
    tensorboard_queue_size: int
    log_timers_to_tensorboard: bool
    log_validation_ppl_to_tensorboard: bool
    log_memory_to_tensorboard: bool
    log_world_size_to_tensorboard: bool
    log_batch_size_to_tensorboard: bool
    log_loss_scale_to_tensorboard: bool
    log_learning_rate_to_tensorboard: bool
    wandb_entity: str
    wandb_exp_name: str
    wandb_save_dir: str
    enable_one_logger: bool
    one_logger_project: str
    one_logger_run_name: str | None
    one_logger_async: bool
    app_tag_run_name: str | None
    app_tag_run_version: str
    train_iters: int | None
    train_samples: int | None
    exit_interval: int | None
    exit_duration_in_mins: int | None
    exit_signal_handler: bool
    exit_signal: str
    exit_signal_handler_for_dataloader: bool
    eval_iters: int
    full_validation: bool
    multiple_validation_sets: bool
    manual_gc: bool
    manual_gc_interval: int
    manual_gc_eval: bool
    empty_unused_memory_level: int
    train_sync_interval: int | None
    adlr_autoresume: bool
    adlr_autoresume_interval: int
    enable_ft_package: bool
    calc_ft_timeouts: bool
    inprocess_restart: bool
    rerun_mode: str
    error_injection_rate: int
    error_injection_type: str
    result_rejected_tracker_filename: str | None
    check_for_spiky_loss: bool
    check_weight_hash_across_dp_replicas_interval: int | None
    enable_msc: bool
    local_rank: int
    lazy_mpu_init: bool
    bert_binary_head: bool
    onnx_safe: bool
    scatter_gather_tensors_in_pipeline: bool
    use_dist_ckpt: bool
    dist_ckpt_format: str | None
    auto_detect_ckpt_format: bool
    use_persistent_ckpt_worker: bool
    ckpt_fully_parallel_save_deprecated: bool
    ckpt_fully_parallel_load: bool
    ckpt_assume_constant_structure: bool
    dist_ckpt_save_pre_mcore_014: bool
    dist_ckpt_optim_fully_reshardable: bool
    inference_batch_times_seqlen_threshold: int
    inference_max_requests: int
    inference_max_batch_size: int
    inference_max_seq_length: int
    inference_dynamic_batching: bool
    max_tokens_to_oom: int
    nccl_all_reduce_for_prefill: bool
    use_mcore_models: bool
    deprecated_use_mcore_models: bool
    use_flash_attn: bool
    fp16_lm_cross_entropy: bool
    skip_train: bool
    decrease_batch_size_if_needed: bool
    rampup_batch_size: list[int] | None
    iterations_to_skip: list[int]
    lr_decay_samples: int | None
    lr_warmup_samples: int
    lr_wsd_decay_samples: int | None
    profile: bool
    non_persistent_save_interval: int | None
    non_persistent_ckpt_type: str | None
    non_persistent_global_ckpt_dir: str | None
    non_persistent_local_ckpt_dir: str | None
    non_persistent_local_ckpt_algo: str
    replication: bool
    replication_jump: int | None
    replication_factor: int
    pretrained_checkpoint: str | None
    load_main_params_from_ckpt: bool
    use_checkpoint_args: bool
    use_mp_args_from_checkpoint_args: bool
    exit_on_missing_checkpoint: bool
    ckpt_convert_format: str | None
    ckpt_convert_save: str | None
    ckpt_convert_update_legacy_dist_opt_format: bool
    dist_ckpt_strictness: str
    strict_fsdp_dtensor_load: bool
    distrib_optim_fully_reshardable_mem_efficient: bool
    openai_gelu: bool
    quick_geglu: bool
    encoder_num_layers: int | None
    decoder_num_layers: int | None
    use_legacy_models: bool
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    hybrid_attention_ratio: float
    hybrid_mlp_ratio: float
    hybrid_override_pattern: str | None
    heterogeneous_layers_config_path: str | None
    heterogeneous_layers_config_encoded_json: str | None
    te_precision_config_file: str | None
    kitchen_config_file: str | None
    kitchen_recipe_number: int | None
    yaml_cfg: str | None
    disable_jit_fuser: bool
    moe_use_upcycling: bool
    moe_upcycling_granularity: int
    sft: bool
    sft_tokenizer_prompt_format: str
    tp_comm_overlap_cfg: str | None
    encoder_tensor_model_parallel_size: int
    encoder_pipeline_model_parallel_size: int
    standalone_embedding_stage: bool
    pipeline_model_parallel_split_rank: int | None
    ddp_num_buckets: int | None
    use_torch_fsdp2: bool
    torch_fsdp2_reshard_after_forward: bool
    enable_full_sharding_in_hsdp: bool
    use_sharp: bool
    sharp_enabled_group: str | None
    create_all_gather_group: bool
    high_priority_stream_groups: list[str]
    fake_process_group: bool
    enable_gloo_process_groups: bool
    align_grad_reduce: bool

    # fields of its configuration classes that have other names than their flags
    layernorm_epsilon: float
    layernorm_zero_centered_gamma: bool
    gated_linear_unit: bool
    fp8_param: bool
    num_moe_experts: int | None
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    grad_reduce_in_fp32: bool
    check_for_nan_in_grad: bool
    nccl_ub: bool
    bucket_size: int | None
    average_in_collective: bool
    pad_buckets_for_high_nccl_busbw: bool
    reduce_scatter_with_fp32_accumulation: bool
    use_te_rng_tracker: bool
