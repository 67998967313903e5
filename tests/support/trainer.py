"""What the trainer's integration tests share: flags of a tiny model, rollouts made up from a seed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def trainer_args(checkpoint: str | Path, **overrides: Any) -> argparse.Namespace:
    """Return the namespace a trainer reads, for the dense tiny model in ``checkpoint``; no flag parsing involved."""
    c = json.loads((Path(checkpoint) / "config.json").read_text())
    rope = c.get("rope_parameters") or {}
    heads = c["num_attention_heads"]
    values: dict[str, Any] = {
        # model
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "ffn_hidden_size": c["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": c["num_key_value_heads"],
        "kv_channels": c.get("head_dim") or c["hidden_size"] // heads,
        "vocab_size": c["vocab_size"],
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": None,
        "max_position_embeddings": c["max_position_embeddings"],
        "normalization": "RMSNorm",
        "norm_epsilon": c["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": c["model_type"].startswith(("qwen2", "mimo")),
        "qk_layernorm": c["model_type"].startswith("qwen3"),
        "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope",
        "rotary_base": int(rope.get("rope_theta", c.get("rope_theta", 10000))),
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not c.get("tie_word_embeddings", False),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # parallelism
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "sequence_parallel": False,
        "use_distributed_optimizer": True,
        "distributed_backend": "gloo",
        "bf16": False,
        "fp16": False,
        "seed": 1234,
        "moe_router_topk": 2,
        # optimiser
        "optimizer": "adam",
        "lr": 1e-3,
        "min_lr": 0.0,
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
        "sgd_momentum": 0.9,
        # rollout and algorithm
        "hf_checkpoint": str(checkpoint),
        "load": None,
        "save": None,
        "ref_load": None,
        "num_rollout": 8,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
        "data_pad_size_multiplier": 8,
        "rollout_temperature": 0.7,
        "log_probs_chunk_size": -1,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "compute_advantages_and_returns": True,
        "normalize_advantages": False,
        "kl_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "low_var_kl",
        "use_unbiased_kl": False,
        "entropy_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "gamma": 1.0,
        "lambd": 1.0,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "use_rollout_logprobs": False,
        "get_mismatch_metrics": False,
        "use_opsm": False,
        "calculate_per_token_loss": False,
        **_expert_args(c),
    }
    unknown = set(overrides) - set(values) - {"num_layers"} - OPTIONAL
    if unknown:
        raise TypeError(f"trainer_args got unknown names {sorted(unknown)}")
    values.update(overrides)
    return argparse.Namespace(**values)


def _expert_args(config: dict[str, Any]) -> dict[str, Any]:
    """Return how the experts of a model are described, nothing for a dense one."""
    count = config.get("num_experts", config.get("num_local_experts"))
    if count is None:
        return {}
    return {
        "num_experts": count,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": "shared_expert_intermediate_size" in config,
        "moe_router_pre_softmax": not config["norm_topk_prob"],
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": [int(i not in config["mlp_only_layers"]) for i in range(config["num_hidden_layers"])],
    }


OPTIONAL = {
    "mismatch_alarm_threshold", "mismatch_stop_threshold",
    "expert_tensor_parallel_size", "moe_aux_loss_coeff", "moe_layer_freq", "moe_router_bias_update_rate",
    "moe_router_enable_expert_bias", "moe_router_score_function", "moe_shared_expert_overlap", "moe_z_loss_coeff",
    "moe_router_load_balancing_type", "moe_per_layer_logging",
    "async_save", "overlap_p2p_comm", "virtual_pipeline_model_parallel_size",
    "check_for_nan_in_loss_and_grad", "ci_test", "ckpt_step", "custom_advantage_function_path",
    "custom_loss_function_path", "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path", "custom_megatron_init_path",
    "custom_pg_loss_reducer_function_path", "custom_tis_function_path", "finetune", "log_multi_turn",
    "log_passrate", "no_load_optim", "no_load_rng", "no_save_optim", "overlap_grad_reduce",
    "overlap_param_gather", "recompute_granularity", "recompute_loss_function", "recompute_method",
    "recompute_modules", "recompute_num_layers", "ref_update_interval", "reset_optimizer_states",
    "rollout_data_postprocess_path", "save_debug_train_data", "save_hf", "use_rollout_entropy", "opsm_delta",
    "pg_loss_length", "pg_loss_reducer",
    "use_routing_replay", "use_rollout_routing_replay", "mtp_num_layers", "enable_mtp_training",
    "mtp_loss_scaling_factor",
    "disable_param_buffers_cpu_backup", "use_stateless_adam", "use_pytorch_profiler", "profile_step_start",
    "profile_step_end", "profile_ranks", "profile_target", "tensorboard_dir",
}  # fmt: skip


def make_train_data(
    *,
    prompts: int = 4,
    per_prompt: int = 2,
    vocab_size: int = 256,
    seed: int = 0,
    shortest: int = 3,
    longest: int = 24,
    scaled: bool = True,
) -> dict[str, list[Any]]:
    """Return train data of ``prompts * per_prompt`` random samples with prompts of 2 to 9 tokens and masked spans.

    Engine log-probs are made up near those of a uniform policy; rewards are normalised within a prompt's group,
    unless ``scaled`` without the division by its standard deviation.
    """
    rng = np.random.default_rng(seed)
    data: dict[str, list[Any]] = {
        key: []
        for key in ("tokens", "response_lengths", "loss_masks", "rewards", "raw_reward", "rollout_log_probs",
                    "sample_indices", "rollout_ids", "rollout_mask_sums", "truncated")
    }  # fmt: skip
    for group in range(prompts):
        prompt = rng.integers(0, vocab_size, rng.integers(2, 10)).tolist()
        raw = rng.normal(size=per_prompt)
        for i in range(per_prompt):
            response = int(rng.integers(shortest, longest + 1))
            mask = np.ones(response, dtype=int)
            mask[1::5] = rng.integers(0, 2, len(mask[1::5]))
            index = group * per_prompt + i
            data["tokens"].append(prompt + rng.integers(0, vocab_size, response).tolist())
            data["response_lengths"].append(response)
            data["loss_masks"].append(mask.tolist())
            data["rewards"].append(float((raw[i] - raw.mean()) / (raw.std() + 1e-6 if scaled else 1)))
            data["raw_reward"].append(float(raw[i]))
            data["rollout_log_probs"].append((rng.normal(size=response) * 0.1 - np.log(vocab_size)).tolist())
            data["sample_indices"].append(100 + index)
            data["rollout_ids"].append(index)
            data["rollout_mask_sums"].append(int(mask.sum()))
            data["truncated"].append(0)
    return data


def make_shards(args: argparse.Namespace, data: dict[str, list[Any]], parallel_config: dict[str, int]) -> list[Any]:
    """Return the shards that the rollout manager would make of ``data`` for trainers with ``parallel_config``."""
    from slime.batching.columns import RolloutBatch
    from slime.batching.schedule import build_dp_schedule

    batch = RolloutBatch.from_train_data(data)
    schedule = build_dp_schedule(
        args,
        parallel_config,
        batch.total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=batch.rollout_ids,
    )
    return batch.shards(schedule)


def tiny_checkpoint(
    out: str | Path, *, seed: int, num_hidden_layers: int = 2, family: str = "qwen3", **fields: Any
) -> str:
    """Write a tiny model whose norms differ from one and whose predictions differ from uniform; return its path."""
    import torch
    from safetensors.torch import load_file, save_file

    from tools.tiny_model import make_tiny_checkpoint

    written = make_tiny_checkpoint(out, family, seed=seed, num_hidden_layers=num_hidden_layers, **fields)
    path = written / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1 + 0.3 * torch.randn(t.shape, generator=generator) if "norm" in name else 3 * t
        for name, t in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return str(out)
