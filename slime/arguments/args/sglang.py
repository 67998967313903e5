"""The flags of SGLang's server as attributes with their types.

Written by `python -m tools.gen_args` from slime/arguments/passthrough; change it there.
"""

from __future__ import annotations

from typing import Any


class SGLangArgs:
    """The flags of SGLang's server."""

    # SGLang server
    sglang_tokenizer_path: str | None
    sglang_tokenizer_mode: str
    sglang_tokenizer_backend: str
    sglang_tokenizer_worker_num: int
    sglang_detokenizer_worker_num: int
    sglang_skip_tokenizer_init: bool
    sglang_load_format: str
    sglang_model_loader_extra_config: str
    sglang_context_length: int | None
    sglang_is_embedding: bool
    sglang_enable_multimodal: bool | None
    sglang_revision: str | None
    sglang_model_impl: str
    sglang_model_config_parser: str
    sglang_json_model_override_args: str
    sglang_dtype: str
    sglang_quantization: str | None
    sglang_quantization_param_path: str | None
    sglang_kv_cache_dtype: str
    sglang_enable_fp32_lm_head: bool
    sglang_modelopt_quant: str | None
    sglang_modelopt_checkpoint_restore_path: str | None
    sglang_modelopt_checkpoint_save_path: str | None
    sglang_modelopt_export_path: str | None
    sglang_quantize_and_serve: bool
    sglang_rl_quant_profile: str | None
    sglang_enable_tf32_matmul: bool
    sglang_mem_fraction_static: float | None
    sglang_max_running_requests: int | None
    sglang_max_queued_requests: int | None
    sglang_max_total_tokens: int | None
    sglang_chunked_prefill_size: int | None
    sglang_prefill_decode_interval: int | None
    sglang_enable_dynamic_chunking: bool
    sglang_max_prefill_tokens: int
    sglang_prefill_max_requests: int | None
    sglang_schedule_policy: str
    sglang_enable_priority_scheduling: bool
    sglang_disable_priority_preemption: bool
    sglang_default_priority_value: int | None
    sglang_abort_on_priority_when_disabled: bool
    sglang_schedule_low_priority_values_first: bool
    sglang_priority_scheduling_preemption_threshold: int
    sglang_retraction_policy: str
    sglang_schedule_conservativeness: float
    sglang_page_size: int | None
    sglang_c128_page_size: int
    sglang_swa_full_tokens_ratio: float | None
    sglang_disable_hybrid_swa_memory: bool
    sglang_radix_eviction_policy: str
    sglang_radix_eviction_policy_config: Any
    sglang_prefill_only_disable_kv_cache: bool
    sglang_disable_radix_cache: bool
    sglang_enable_page_major_kv_layout: bool
    sglang_enable_unified_memory: bool
    sglang_disable_chunked_prefix_cache: bool
    sglang_disable_overlap_schedule: bool
    sglang_num_continuous_decode_steps: int
    sglang_scheduler_recv_interval: int
    sglang_enable_mixed_chunk: bool
    sglang_dist_timeout: int | None
    sglang_gated_launch_port: int | None
    sglang_tp_size: int
    sglang_dcp_size: int
    sglang_pp_size: int
    sglang_pp_max_micro_batch_size: int | None
    sglang_pp_async_batch_depth: int
    sglang_dp_size: int
    sglang_load_balance_method: str
    sglang_attn_cp_size: int
    sglang_moe_dp_size: int
    sglang_dwdp_size: int
    sglang_dcp_comm_backend: str | None
    sglang_dcp_replicate_q_proj: bool | None
    sglang_enable_prefill_cp: bool
    sglang_cp_strategy: str | None
    sglang_enable_dsa_cache_layer_split: bool
    sglang_enable_cp_decode_attn_tp: bool
    sglang_enable_dp_attention: bool
    sglang_enable_dp_attention_local_control_broadcast: bool
    sglang_enable_dp_lm_head: bool
    sglang_enable_tp_lm_head_all_to_all: bool | None
    sglang_enable_attn_tp_input_scattered: bool
    sglang_enable_shared_experts_attn_tp: bool
    sglang_enable_dense_mlp_attn_tp: bool
    sglang_enable_layernorm_sp: bool
    sglang_disable_attn_tp_gather: bool
    sglang_enable_p2p_check: bool
    sglang_device: str | None
    sglang_mlx_enable_sampling: bool
    sglang_watchdog_timeout: float
    sglang_soft_watchdog_timeout: float | None
    sglang_sleep_on_idle: bool
    sglang_use_ray: bool
    sglang_numa_node: list[int] | None
    sglang_gc_threshold: list[int] | None
    sglang_host: str
    sglang_fastapi_root_path: str
    sglang_smg_grpc_mode: bool
    sglang_grpc_mode: bool
    sglang_grpc_port: int | None
    sglang_sidecar: str | None
    sglang_sidecar_args: Any
    sglang_warmups: str | None
    sglang_enable_http2: bool
    sglang_http2_max_concurrent_streams: int
    sglang_http2_initial_connection_window_size: int
    sglang_ssl_keyfile: str | None
    sglang_ssl_certfile: str | None
    sglang_ssl_ca_certs: str | None
    sglang_ssl_keyfile_password: str | None
    sglang_enable_ssl_refresh: bool
    sglang_api_key: str | None
    sglang_admin_api_key: str | None
    sglang_served_model_name: str | None
    sglang_weight_version: str
    sglang_chat_template: str | None
    sglang_hf_chat_template_name: str | None
    sglang_completion_template: str | None
    sglang_file_storage_path: str
    sglang_enable_cache_report: bool
    sglang_return_input_ids: bool
    sglang_return_output_ids: bool
    sglang_default_chat_template_kwargs: Any
    sglang_strip_thinking_cache: bool
    sglang_enable_strict_thinking: bool
    sglang_tool_server: str | None
    sglang_sampling_defaults: str
    sglang_asr_max_buffer_seconds: int
    sglang_asr_max_concurrent_sessions: int
    sglang_preferred_sampling_params: Any
    sglang_allow_auto_truncate: bool
    sglang_stream_interval: int
    sglang_batch_notify_size: int
    sglang_stream_response_default_include_usage: bool
    sglang_incremental_streaming_output: bool
    sglang_enable_streaming_session: bool
    sglang_enable_session_radix_cache: bool
    sglang_log_level: str
    sglang_log_level_http: str | None
    sglang_log_requests: bool
    sglang_log_requests_level: int
    sglang_log_requests_format: str
    sglang_log_requests_target: list[str] | None
    sglang_uvicorn_access_log_exclude_prefixes: list[str]
    sglang_crash_dump_folder: str | None
    sglang_show_time_cost: bool
    sglang_enable_metrics: bool
    sglang_smg_http_sidecar_port: int | None
    sglang_enable_mfu_metrics: bool
    sglang_enable_metrics_for_all_schedulers: bool
    sglang_load_snapshot_publish_interval: int
    sglang_tokenizer_metrics_custom_labels_header: str
    sglang_tokenizer_metrics_allowed_custom_labels: list[str] | None
    sglang_extra_metric_labels: Any
    sglang_bucket_time_to_first_token: list[float] | None
    sglang_bucket_inter_token_latency: list[float] | None
    sglang_bucket_e2e_request_latency: list[float] | None
    sglang_prompt_tokens_buckets: list[str] | None
    sglang_generation_tokens_buckets: list[str] | None
    sglang_gc_warning_threshold_secs: float
    sglang_decode_log_interval: int
    sglang_enable_request_time_stats_logging: bool
    sglang_kv_events_config: str | None
    sglang_load_publish_endpoint: str | None
    sglang_enable_forward_pass_metrics: bool
    sglang_forward_pass_metrics_worker_id: str
    sglang_forward_pass_metrics_ipc_name: str | None
    sglang_enable_trace: bool
    sglang_trace_modules: str
    sglang_otlp_traces_endpoint: str
    sglang_export_metrics_to_file: bool
    sglang_export_metrics_to_file_dir: str | None
    sglang_constrained_json_whitespace_pattern: str | None
    sglang_constrained_json_disable_any_whitespace: bool
    sglang_attention_backend: str | None
    sglang_decode_attention_backend: str | None
    sglang_enable_lean_attention: bool | None
    sglang_prefill_attention_backend: str | None
    sglang_grammar_backend: str | None
    sglang_radix_cache_backend: str | None
    sglang_mm_attention_backend: str | None
    sglang_fp8_gemm_runner_backend: str
    sglang_fp4_gemm_runner_backend: str
    sglang_bf16_gemm_backend: str
    sglang_dsa_prefill_backend: str | None
    sglang_dsv4_prefill_backend: str
    sglang_dsa_decode_backend: str | None
    sglang_dsa_paged_mqa_logits_backend: str
    sglang_dsa_topk_backend: str
    sglang_disable_flashinfer_autotune: bool
    sglang_flashinfer_autotune_skip_ops: list[str] | None
    sglang_mamba_backend: str
    sglang_cuda_graph_config: str | None
    sglang_cuda_graph_backend_decode: str | None
    sglang_cuda_graph_backend_prefill: str | None
    sglang_cuda_graph_max_bs_decode: int | None
    sglang_cuda_graph_max_bs_prefill: int | None
    sglang_cuda_graph_bs_decode: list[int] | None
    sglang_cuda_graph_bs_prefill: list[int] | None
    sglang_cuda_graph_tc_compiler: str | None
    sglang_disable_prefill_cuda_graph: bool
    sglang_disable_decode_cuda_graph: bool
    sglang_disable_cuda_graph_padding: bool
    sglang_enable_profile_cuda_graph: bool
    sglang_enable_cudagraph_gc: bool
    sglang_debug_cuda_graph: bool
    sglang_enable_layerwise_nvtx_marker: bool
    sglang_enable_nccl_nvls: bool
    sglang_enable_symm_mem: bool
    sglang_triton_attention_reduce_in_fp32: bool
    sglang_triton_attention_num_kv_splits: int
    sglang_triton_attention_split_tile_size: int | None
    sglang_flashinfer_mla_disable_ragged: bool
    sglang_enable_fused_qk_norm_rope: bool
    sglang_enable_precise_embedding_interpolation: bool
    sglang_enable_fused_moe_sum_all_reduce: bool
    sglang_enable_deepseek_v4_fp4_indexer: bool
    sglang_disable_custom_all_reduce: bool
    sglang_enable_mscclpp: bool
    sglang_enable_torch_symm_mem: bool
    sglang_enable_scattered_sconv: bool
    sglang_pre_warm_nccl: bool
    sglang_enable_quant_communications: bool
    sglang_enforce_disable_flashinfer_allreduce_fusion: bool
    sglang_flashinfer_allreduce_fusion_backend: str | None
    sglang_enable_aiter_allreduce_fusion: bool
    sglang_enable_torch_compile: bool
    sglang_enable_torch_compile_debug_mode: bool
    sglang_torch_compile_max_bs: int
    sglang_speculative_algorithm: str | None
    sglang_uno_lora_path: str | None
    sglang_speculative_draft_model_path: str | None
    sglang_speculative_draft_model_revision: str | None
    sglang_speculative_draft_load_format: str | None
    sglang_speculative_num_steps: int | None
    sglang_speculative_eagle_topk: int | None
    sglang_speculative_num_draft_tokens: int | None
    sglang_speculative_dflash_block_size: int | None
    sglang_speculative_dspark_block_size: int | None
    sglang_speculative_dspark_sps_table_path: str | None
    sglang_speculative_dspark_confidence_sts_path: str | None
    sglang_speculative_dspark_align_verify_tokens_to_graph_tier: bool
    sglang_speculative_accept_threshold_single: float
    sglang_speculative_accept_threshold_acc: float
    sglang_speculative_use_rejection_sampling: bool
    sglang_speculative_token_map: str | None
    sglang_speculative_attention_mode: str
    sglang_speculative_draft_attention_backend: str | None
    sglang_speculative_dsa_topk_backend: str
    sglang_speculative_draft_kv_cache_dtype: str | None
    sglang_speculative_draft_window_size: int | None
    sglang_speculative_moe_runner_backend: str | None
    sglang_speculative_moe_a2a_backend: str | None
    sglang_speculative_draft_model_quantization: str | None
    sglang_speculative_skip_dp_mlp_sync: bool
    sglang_enable_multi_layer_eagle: bool
    sglang_speculative_adaptive: bool
    sglang_speculative_adaptive_config: str | None
    sglang_decoupled_spec_bind_endpoint: str | None
    sglang_decoupled_spec_connect_endpoints: Any
    sglang_decoupled_spec_rank: int | None
    sglang_decoupled_spec_role: str
    sglang_spec_trace_dir: str | None
    sglang_speculative_ngram_min_bfs_breadth: int
    sglang_speculative_ngram_max_bfs_breadth: int
    sglang_speculative_ngram_match_type: str
    sglang_speculative_ngram_max_trie_depth: int
    sglang_speculative_ngram_capacity: int
    sglang_speculative_ngram_external_corpus_path: str | None
    sglang_speculative_ngram_external_sam_budget: int
    sglang_speculative_ngram_external_corpus_max_tokens: int
    sglang_ep_size: int
    sglang_moe_a2a_backend: str
    sglang_enable_w4a4_mxfp4_megamoe: bool
    sglang_deepep_v2_mode: str
    sglang_moe_runner_backend: str
    sglang_flashinfer_mxfp4_moe_precision: str
    sglang_deepep_mode: str
    sglang_fuseep_mode: int
    sglang_deepep_dispatcher_output_dtype: str
    sglang_ep_num_redundant_experts: int
    sglang_ep_dispatch_algorithm: str | None
    sglang_init_expert_location: str
    sglang_enable_eplb: bool
    sglang_eplb_algorithm: str
    sglang_eplb_rebalance_num_iterations: int
    sglang_eplb_rebalance_layers_per_chunk: int | None
    sglang_eplb_min_rebalancing_utilization_threshold: float
    sglang_expert_distribution_recorder_mode: str | None
    sglang_expert_distribution_recorder_buffer_size: int | None
    sglang_expert_balancedness_report_mode: str
    sglang_deepep_config: str | None
    sglang_moe_dense_tp_size: int | None
    sglang_elastic_ep_backend: str | None
    sglang_enable_elastic_expert_backup: bool
    sglang_mooncake_ib_device: str | None
    sglang_enable_waterfill: bool
    sglang_ep_join_mode: str | None
    sglang_ep_join_rank_offset: int
    sglang_elastic_ep_initial_size: int | None
    sglang_max_ep_size: int | None
    sglang_elastic_ep_scale_timeout: float
    sglang_elastic_ep_rejoin: bool
    sglang_disable_flashinfer_cutlass_moe_fp4_allgather: bool
    sglang_disable_shared_experts_fusion: bool
    sglang_enforce_shared_experts_fusion: bool
    sglang_max_mamba_cache_size: int | None
    sglang_mamba_ssm_dtype: str | None
    sglang_mamba_max_states_per_path: int
    sglang_enable_mamba_cache_stochastic_rounding: bool
    sglang_mamba_cache_philox_rounds: int
    sglang_mamba_full_memory_ratio: float | None
    sglang_mamba_radix_cache_strategy: str
    sglang_mamba_track_interval: int
    sglang_enable_int8_mamba_checkpoint: bool
    sglang_int8_mamba_ckpt_size: int | None
    sglang_linear_attn_backend: str
    sglang_linear_attn_decode_backend: str | None
    sglang_linear_attn_prefill_backend: str | None
    sglang_linear_attn_verify_backend: str | None
    sglang_enable_linear_replayssm: bool
    sglang_linear_replayssm_cache_len: int
    sglang_enable_linear_replayssm_spec: bool
    sglang_enable_hierarchical_cache: bool
    sglang_hicache_host_memory_mode: str
    sglang_hicache_ratio: float | None
    sglang_hicache_size: int
    sglang_hicache_write_policy: str
    sglang_hicache_io_backend: str
    sglang_hicache_mem_layout: str
    sglang_hicache_storage_backend: str | None
    sglang_hicache_storage_prefetch_policy: str
    sglang_hicache_storage_backend_extra_config: str | None
    sglang_hicache_storage_prefetch_retry_poll_interval: int
    sglang_hicache_storage_prefetch_retry_max_attempts: int
    sglang_enable_unified_cache_external_linker: bool
    sglang_unified_cache_external_linker_backend: str
    sglang_enable_hisparse: bool
    sglang_hisparse_config: str | None
    sglang_enable_broadcast_mm_inputs_process: bool
    sglang_enable_prefix_mm_cache: bool
    sglang_mm_enable_dp_encoder: bool
    sglang_mm_process_config: Any
    sglang_mm_processor_worker_num: int
    sglang_mm_io_worker_num: int
    sglang_allowed_media_domains: list[str]
    sglang_media_url_max_file_size_mb: int
    sglang_mm_preprocess_cache_size_mb: int | None
    sglang_trust_mm_content_hashes: bool
    sglang_limit_mm_data_per_request: Any
    sglang_enable_mm_global_cache: bool
    sglang_image_processor_backend: str
    sglang_mm_global_cache_backend: str
    sglang_disable_fast_image_processor: bool
    sglang_mm_feature_transport: str | None
    sglang_keep_mm_feature_on_device: bool
    sglang_enable_lora: bool | None
    sglang_enable_lora_overlap_loading: bool | None
    sglang_max_lora_rank: int | None
    sglang_lora_target_modules: list[str] | None
    sglang_lora_paths: list[str] | None
    sglang_max_loaded_loras: int | None
    sglang_max_loras_per_batch: int
    sglang_lora_eviction_policy: str
    sglang_lora_backend: str
    sglang_max_lora_chunk_size: int
    sglang_experts_shared_outer_loras: bool | None
    sglang_lora_use_virtual_experts: bool
    sglang_lora_strict_loading: bool
    sglang_lora_drain_wait_threshold: float
    sglang_enable_two_batch_overlap: bool
    sglang_enable_single_batch_overlap: bool
    sglang_tbo_token_distribution_threshold: float
    sglang_cpu_offload_gb: int
    sglang_offload_group_size: int
    sglang_offload_num_in_group: int
    sglang_offload_prefetch_step: int
    sglang_offload_mode: str
    sglang_enable_lmcache: bool
    sglang_lmcache_config_file: str | None
    sglang_enable_flexkv: bool
    sglang_flexkv_config_file: str | None
    sglang_kt_weight_path: str | None
    sglang_kt_method: str
    sglang_kt_cpuinfer: int | None
    sglang_kt_threadpool_count: int
    sglang_kt_num_gpu_experts: int | None
    sglang_kt_max_deferred_experts_per_token: int | None
    sglang_dllm_algorithm: str | None
    sglang_dllm_algorithm_config: str | None
    sglang_dllm_fdfo: bool
    sglang_disaggregation_mode: str
    sglang_disaggregation_transfer_backend: str
    sglang_disaggregation_bootstrap_port: int
    sglang_disaggregation_ib_device: str | None
    sglang_disaggregation_decode_enable_radix_cache: bool
    sglang_disaggregation_decode_enable_offload_kvcache: bool
    sglang_disaggregation_decode_retraction_backup: str | None
    sglang_num_reserved_decode_tokens: int
    sglang_disaggregation_decode_extra_slots: int | None
    sglang_disaggregation_decode_polling_interval: int
    sglang_optimistic_prefill_attempts: int
    sglang_encoder_only: bool
    sglang_language_only: bool
    sglang_language_model_only: bool
    sglang_encoder_transfer_backend: str
    sglang_encoder_urls: list[str]
    sglang_encoder_bootstrap_port: int
    sglang_encoder_register_urls: list[str]
    sglang_enable_adaptive_dispatch_to_encoder: bool
    sglang_enable_pdmux: bool
    sglang_pdmux_config_path: str | None
    sglang_sm_group_num: int
    sglang_startup_weight_load_mode: str
    sglang_custom_weight_loader: list[str] | None
    sglang_weight_loader_disable_mmap: bool
    sglang_weight_loader_prefetch_checkpoints: bool
    sglang_weight_loader_prefetch_num_threads: int
    sglang_weight_loader_drop_cache_after_load: bool
    sglang_remote_instance_weight_loader_seed_instance_ip: str | None
    sglang_remote_instance_weight_loader_seed_instance_service_port: int | None
    sglang_remote_instance_weight_loader_send_weights_group_ports: Any
    sglang_remote_instance_weight_loader_backend: str
    sglang_remote_instance_weight_loader_start_seed_via_transfer_engine: bool
    sglang_engine_info_bootstrap_port: int
    sglang_modelexpress_config: str | None
    sglang_download_dir: str | None
    sglang_model_checksum: str | None
    sglang_delete_ckpt_after_loading: bool
    sglang_decrypted_config_file: str | None
    sglang_decrypted_draft_config_file: str | None
    sglang_checkpoint_engine_wait_weights_before_ready: bool
    sglang_enable_prefill_delayer: bool
    sglang_prefill_delayer_max_delay_passes: int
    sglang_prefill_delayer_token_usage_low_watermark: float | None
    sglang_prefill_delayer_forward_passes_buckets: list[float] | None
    sglang_prefill_delayer_wait_seconds_buckets: list[float] | None
    sglang_prefill_delayer_queue_min_ratio: float | None
    sglang_prefill_delayer_max_delay_ms: float | None
    sglang_min_free_slots_delay: int | None
    sglang_enable_deterministic_inference: bool
    sglang_rl_on_policy_target: str | None
    sglang_kv_canary: str
    sglang_kv_canary_sweep_interval: int
    sglang_enable_dynamic_batch_tokenizer: bool
    sglang_dynamic_batch_tokenizer_batch_size: int
    sglang_dynamic_batch_tokenizer_batch_timeout: float
    sglang_enable_tokenizer_batch_encode: bool
    sglang_disable_tokenizer_batch_decode: bool
    sglang_debug_tensor_dump_output_folder: str | None
    sglang_debug_tensor_dump_layers: list[int] | None
    sglang_debug_tensor_dump_input_file: str | None
    sglang_enable_weights_cpu_backup: bool
    sglang_enable_draft_weights_cpu_backup: bool
    sglang_enable_custom_logit_processor: bool
    sglang_enable_return_hidden_states: bool
    sglang_return_hidden_states_mode: str | None
    sglang_enable_return_indexer_topk: bool
    sglang_sampling_mask_max_tokens: int
    sglang_disable_outlines_disk_cache: bool
    sglang_enable_mis: bool
    sglang_weight_cache_mode: str
    sglang_weight_cache_socket: str | None
    sglang_weight_cache_timeout: int
    sglang_forward_hooks: Any
    sglang_msprobe_dump_config: str | None
    sglang_ple_offload_embedding: bool | None
    sglang_ple_offload_backend: str
    sglang_ple_offload_dir: str | None
    sglang_speculative_domino_candidate_pool_size: int
    sglang_flashinfer_a2a_dispatch_type: str | None
    sglang_dsv4_attn_backend: str
    sglang_enable_response_store: bool
    sglang_sampling_backend: str | None
    sglang_reasoning_parser: str | None
    sglang_tool_call_parser: str | None
    sglang_kv_canary_real_data: str
    sglang_disable_cuda_graph: bool
    sglang_enable_flashinfer_allreduce_fusion: bool
