"""Traits of the flags of Megatron, SGLang and the router, which slime does not declare: the one table of them.

Delete a line (or one value of ``not_yet``) to make a flag available.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from slime.arguments.flag import Flag
from slime.arguments.traits import UNSET, Traits, WithoutGpu

_NOT_YET = Traits(not_yet=True)
_ENGINES_GENERATE = Traits(inert="it concerns generation with Megatron; engines generate here")
_UNREAD = Traits(inert="megatron-core does not read it; leave it out")
_OWN_LOG_PROBS = Traits(inert="slime computes log-probs itself; see --log-probs-chunk-size")
_LAYOUT = Traits(same_for_roles="layout")
_RESTARTS = Traits(restarts=True)
_FROM_SIZES = Traits(from_sizes=True)
_OFF_WITHOUT_GPU = Traits(without_gpu=WithoutGpu(False))
_FUSED = Traits(without_gpu=WithoutGpu(False), fused_kernel=True)
_EXPERTS = Traits(needs_experts=True)
_DTYPE = Traits(dtype=True)


def _cpu_engine(value: object) -> Traits:
    return Traits(without_gpu=WithoutGpu(value, given_holds=True))


TRAITS: dict[str, Traits] = {
    # ranks of actor and critic with the same number work on the same samples
    "tensor_model_parallel_size": Traits(same_for_roles="layout", divides_model=True),
    "pipeline_model_parallel_size": Traits(same_for_roles="layout", divides_model=True),
    "context_parallel_size": _LAYOUT,
    "use_tp_pp_dp_mapping": _LAYOUT,
    "expert_model_parallel_size": Traits(divides_model=True),
    "pipeline_model_parallel_layout": Traits(divides_layers=True),
    "account_for_embedding_in_pipeline_split": Traits(divides_layers=True),
    "account_for_loss_in_pipeline_split": Traits(divides_layers=True),
    # what a role that takes weights alone is given
    "no_load_optim": _RESTARTS,
    "no_load_rng": _RESTARTS,
    "finetune": _RESTARTS,
    "ffn_hidden_size": _FROM_SIZES,
    "kv_channels": _FROM_SIZES,
    # families, formats and kernels that do not exist yet
    "fp4": _NOT_YET,
    "moe_token_drop_policy": Traits(not_yet=("position",)),
    "experimental_attention_variant": _NOT_YET,
    "enable_experimental": Traits(inert="nothing that slime builds of megatron-core asks for it; leave it out"),
    "position_embedding_type": Traits(not_yet=("mrope", "yarn", "relative")),
    "ckpt_format": Traits(not_yet=("zarr", "fsdp_dtensor")),
    # mixture of experts: what drops or disturbs tokens routes otherwise in training than in passes before it
    "moe_enable_routing_replay": _NOT_YET,
    "moe_router_topk_limited_devices": _NOT_YET,
    "moe_router_padding_for_*": _NOT_YET,
    "moe_router_force_load_balancing": _NOT_YET,
    "moe_input_jitter_eps": Traits(not_yet=True, random=True),
    "moe_token_dropping": _NOT_YET,
    "moe_expert_capacity_factor": _NOT_YET,
    "moe_pad_expert_input_to_capacity": _NOT_YET,
    "moe_use_legacy_grouped_gemm": _NOT_YET,
    "moe_latent_size": _NOT_YET,
    "moe_extended_tp": _NOT_YET,
    "moe_use_upcycling": _NOT_YET,
    "moe_upcycling_granularity": _NOT_YET,
    "overlap_moe_expert_parallel_comm": _NOT_YET,
    "delay_wgrad_compute": _NOT_YET,
    "ep_overlap_early_attn_memory_release": _NOT_YET,
    "use_fused_weighted_squared_relu": _NOT_YET,
    # low precision
    "fp4_*": _NOT_YET,
    "keep_fp8_transpose_cache": _NOT_YET,
    "reuse_grad_buf_for_mxfp8_param_ag": _NOT_YET,
    "use_kitchen*": _NOT_YET,
    "kitchen_attention_backend": _NOT_YET,
    # sparse and linear attention, state-space models, multimodal positions
    "cache_mla_latents": _NOT_YET,
    "dsa_*": _NOT_YET,
    "linear_*": _NOT_YET,
    "mamba_*": _NOT_YET,
    "use_mamba_mem_eff_path": _NOT_YET,
    "is_hybrid_model": _NOT_YET,
    "mrope_section": _NOT_YET,
    "mtp_standalone": _NOT_YET,
    "heterogeneous_block_specs": _NOT_YET,
    "hetereogenous_dist_checkpoint": _NOT_YET,
    "qk_clip*": _NOT_YET,
    "log_max_attention_logit": Traits(not_yet=True, needs_te=True),
    # sharded data parallelism
    "use_megatron_fsdp": _NOT_YET,
    "use_custom_fsdp": _NOT_YET,
    "fsdp_*": _NOT_YET,
    "data_parallel_sharding_strategy": _NOT_YET,
    "outer_dp_sharding_strategy": _NOT_YET,
    "gradient_reduce_div_fusion": _NOT_YET,
    "suggested_communication_unit_size": _NOT_YET,
    "preserve_fp32_weights": _NOT_YET,
    "init_model_with_meta_device": _NOT_YET,
    # communication and graphs
    "tp_comm_*": _NOT_YET,
    "hierarchical_context_parallel_sizes": Traits(not_yet=True, needs_te=True),
    "hybrid_context_parallel": Traits(not_yet=True, needs_te=True),
    "max_seqlen_per_dp_cp_rank": _NOT_YET,
    "pipeline_model_parallel_comm_backend": _NOT_YET,
    "overlap_param_gather_with_optimizer_step": _NOT_YET,
    "cuda_graph_*": _NOT_YET,
    "enable_cuda_graph": _NOT_YET,
    "external_cuda_graph": _NOT_YET,
    "batch_invariant_mode": _NOT_YET,
    # optimizer
    "muon_*": _NOT_YET,
    "log_num_zeros_in_grad": _NOT_YET,
    # what can have no effect
    "fp8_param_gather": Traits(inert="weights are kept and gathered in bf16, of which pushes and checkpoints are made"),
    "fp8_interval": Traits(inert="TransformerEngine does not read it; leave it out"),
    "cross_entropy_loss_fusion": _OWN_LOG_PROBS,
    "cross_entropy_fusion_impl": _OWN_LOG_PROBS,
    "apply_residual_connection_post_layernorm": _UNREAD,
    "async_tensor_model_parallel_allreduce": _UNREAD,
    "barrier_with_L1_time": Traits(inert="slime has its own timers; leave it out"),
    "inference_rng_tracker": _ENGINES_GENERATE,
    "inference_sampling_seed": _ENGINES_GENERATE,
    "inference_fuse_tp_communication": _ENGINES_GENERATE,
    "use_inference_optimized_layers": _ENGINES_GENERATE,
    "flash_decode": _ENGINES_GENERATE,
    "mlp_chunks_for_prefill": _ENGINES_GENERATE,
    "symmetric_ar_type": _ENGINES_GENERATE,
    "sglang_host": Traits(inert="engines bind to loopback, or to the address of their host when the run spans several"),
    # what a machine without a GPU cannot do; a module without kernels computes the same, and so does DeepEP
    "bf16": Traits(without_gpu=WithoutGpu(False, "--bf16")),
    "fp16": Traits(without_gpu=WithoutGpu(False, "--fp16")),
    "gradient_accumulation_fusion": _FUSED,
    "masked_softmax_fusion": _FUSED,
    "apply_rope_fusion": _FUSED,
    "bias_gelu_fusion": _OFF_WITHOUT_GPU,
    "bias_dropout_fusion": _OFF_WITHOUT_GPU,
    "persist_layer_norm": _FUSED,
    "moe_grouped_gemm": _FUSED,
    "moe_permute_fusion": _FUSED,
    "moe_token_dispatcher_type": Traits(without_gpu=WithoutGpu("alltoall")),
    "moe_enable_deepep": _OFF_WITHOUT_GPU,
    "tp_comm_overlap": Traits(not_yet=True, without_gpu=WithoutGpu(False, "--tp-comm-overlap"), fused_kernel=True),
    "use_nccl_ub": Traits(without_gpu=WithoutGpu(False, "--use-nccl-ub")),
    "fp8": Traits(without_gpu=WithoutGpu(None, "--fp8-format")),
    "optimizer_cpu_offload": Traits(without_gpu=WithoutGpu(False, "--optimizer-cpu-offload")),
    # engines on a machine without a GPU
    "sglang_device": Traits(without_gpu=WithoutGpu("cpu", given_holds=True), gpu_values=("cuda",)),
    "sglang_attention_backend": Traits(
        without_gpu=WithoutGpu("torch_native", given_holds=True),
        gpu_values=("triton", "flashinfer", "fa3", "fa4", "cutlass_mla", "flashmla", "trtllm_mla", "trtllm_mha"),
    ),
    "sglang_dtype": _cpu_engine("float32"),
    "sglang_disable_overlap_schedule": _cpu_engine(True),
    "sglang_sleep_on_idle": _cpu_engine(True),
    "sglang_max_total_tokens": _cpu_engine(65536),
    "sglang_mem_fraction_static": _cpu_engine(0.3),
    "sglang_chunked_prefill_size": _cpu_engine(2048),
    "sglang_image_processor_backend": _cpu_engine("pil"),  # no torchvision; with images everywhere, see rules.data
    "sglang_disaggregation_transfer_backend": _cpu_engine("nixl"),  # between prefill and decode engines; over TCP
    # the other way copies caches with a CUDA stream
    "sglang_disaggregation_decode_retraction_backup": _cpu_engine("cpu_tensor"),
    # CPU time per token: 13 % less than with 64, 4 % more than with 256
    "sglang_max_running_requests": _cpu_engine(128),
    "attention_backend": Traits(gpu_values=("flash", "fused")),
    "transformer_impl": Traits(gpu_values=("transformer_engine", "inference_optimized")),
    "moe_router_fusion": Traits(fused_kernel=True),
    # attention of TransformerEngine's alone
    "qk_clip": Traits(not_yet=True, needs_te=True),
    # a dense model with one of these is a mistake; other flags of experts are only idle there
    "moe_ffn_hidden_size": _EXPERTS,
    "moe_shared_expert_intermediate_size": Traits(needs_experts=True, left_out=0),
    "moe_router_topk": _EXPERTS,
    "moe_router_num_groups": Traits(needs_experts=True, left_out=1),
    "moe_router_group_topk": Traits(needs_experts=True, left_out=1),
    "moe_router_enable_expert_bias": _EXPERTS,
    "moe_layer_freq": _EXPERTS,
    "moe_router_topk_scaling_factor": Traits(left_out=1),
    # engines and passes for log-probs drop nothing: a policy trained with dropout is not the one that generates
    "attention_dropout": Traits(default=0.0, random=True),
    "hidden_dropout": Traits(default=0.0, random=True),
    # types that --use-precision-aware-optimizer allows
    "main_grads_dtype": _DTYPE,
    "main_params_dtype": _DTYPE,
    "exp_avg_dtype": _DTYPE,
    "exp_avg_sq_dtype": _DTYPE,
    # the router's values of slime
    "router_log_level": Traits(default="warn"),
    "router_balance_abs_threshold": Traits(default=10),
    "router_balance_rel_threshold": Traits(default=1.2),
}
"""By attribute, or by pattern of attributes, which holds for all matching attributes without a line."""


def with_traits(flag: Flag) -> Flag:
    """Return ``flag`` with its traits from the table; trainers read no flags of engines and routers."""
    found = TRAITS.get(flag.dest)
    if found is None and flag.source == "megatron":
        found = next((TRAITS[pattern] for pattern in TRAITS if fnmatchcase(flag.dest, pattern)), None)
    traits = replace(found or flag.traits, read_by="trainers" if flag.source == "megatron" else "run")
    return replace(flag, traits=traits, default=flag.default if traits.default is UNSET else traits.default)
