"""The attributes of the namespace that are no flags, and the flags whose None a rule replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.arguments.files.eval_config import EvalDatasetConfig


class DerivedArgs:
    """Values that ``parse_args``, the device and the running processes add to the flags."""

    explicit_flags: frozenset[str]
    """Attributes that were given, on the command line or in a file."""
    replaced_values: dict[str, Any]
    """Attribute -> value that was given and that a rule replaced."""
    serve_only: bool
    """Engines are served and no rollouts are made: ``slime serve``."""
    log_probs_only: bool
    """Trainers answer requests and nothing is trained: ``slime.ray.driver.log_prob_server``."""

    use_critic: bool
    """There is a critic: the estimator needs one (``slime.algorithms.estimators``)."""
    role_values: dict[str, dict[str, Any]]
    """Role -> attribute -> its value for that role where it differs from the run's."""
    critic_num_nodes: int
    """Nodes of the critic: those of the actor."""
    critic_num_gpus_per_node: int
    """GPUs of the critic on each node: those of the actor."""
    continues_own_checkpoints: bool
    """``--load`` is ``--save``: the run resumes from its own checkpoints."""
    eval_datasets: list[EvalDatasetConfig]
    """Data sets of ``--eval-config`` or ``--eval-prompt-data``."""

    rollout_external: bool
    """Engines are started elsewhere: ``--rollout-external-engine-addrs``."""
    rollout_external_engine_infos: list[dict[str, Any]] | None
    """Answers of the external engines; None before they are asked."""
    rollout_num_engines: int
    """Engines of all models."""

    rank: int
    """Rank of a trainer's process."""
    world_size: int
    """Ranks of the trainer."""
    data_parallel_size: int
    """Replicas of the model in the trainer; not set by ``--debug-rollout-only``."""
    int4_group_size: int
    """Weights per scale of int4 quantization."""
    disable_grad_buffers_cpu_backup: bool
    """Gradients are not copied to host memory when the trainer is offloaded."""
    disable_param_buffers_cpu_backup: bool
    """Weights are not copied to host memory when the trainer is offloaded."""
    variable_seq_lengths: bool
    """Megatron's field: micro-batches have different lengths."""
    deallocate_pipeline_outputs: bool
    """Megatron's field: outputs are freed after they are sent to the next stage."""
    bias_activation_fusion: bool
    """Megatron's field: ``bias_swiglu_fusion`` or ``bias_gelu_fusion``."""

    sglang_tensor_parallel_size: int
    """Tensor parallelism of an engine, as ``sglang_tp_size``."""
    sglang_data_parallel_size: int
    """Data parallelism of an engine, as ``sglang_dp_size``."""
    sglang_pipeline_parallel_size: int
    """Pipeline stages of an engine, as ``sglang_pp_size``."""
    sglang_expert_parallel_size: int
    """Expert parallelism of an engine, as ``sglang_ep_size``."""
    sglang_moe_data_parallel_size: int
    """Data parallelism of an engine's experts, as ``sglang_moe_dp_size``."""

    device_type: str
    """``cpu`` or ``cuda``; set once the cluster is known."""
    run_id: str
    """Identifies the run to processes that outlive it; set once the cluster is known."""
    generates_while_training: bool
    """Rollouts are generated while the trainer trains; set by the loop."""
    sglang_model_routers: dict[str, tuple[str, int]]
    """Model -> host and port of its router; set in the rollout manager once routers run."""
    sglang_model_engines: dict[str, int]
    """Model -> engines that generate; set in the rollout manager once engines run."""

    unchecked: list[str]
    """Sentences about what a dry run could not check; only while the arguments are resolved, as the next three."""
    not_available: list[str]
    """Sentences about features that this version does not have."""
    warnings: list[str]
    """Warnings, which are shown after the command line is accepted."""
    needed: dict[str, str]
    """Attribute -> sentence about a flag that must be given."""


RESOLVED = frozenset({
    # set by a rule
    "end_weight_decay", "ffn_hidden_size", "hidden_size", "kv_channels", "max_position_embeddings",
    "num_attention_heads", "num_layers", "rollout_batch_size", "rope_type", "seq_length", "sglang_tp_size",
    "start_weight_decay", "tokenizer_model", "tokenizer_type",
    # set when the run starts
    "num_rollout", "run_dir", "sglang_router_ip", "sglang_router_port", "start_rollout_id",
    # a rule refuses None where they are read
    "pg_loss_length", "update_weight_disk_dir",
})  # fmt: skip
"""Flags that are None on the command line and are not where they are read, beside those with the trait ``follows`` or
``resolved_by``: ``Args`` has the type they have then."""
