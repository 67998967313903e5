"""Shared parts of the trainer's integration tests: flags of a tiny model, rollouts made up from a seed."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

PLAIN_SGD = {
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "use_distributed_optimizer": False,  # it takes Adam only, and leaves each rank a part of the gradients
    "weight_decay": 0.0,
    "clip_grad": 1e9,
}


def trainer_args(checkpoint: str | Path, **overrides: Any) -> argparse.Namespace:
    """Return parsed arguments for training the tiny model in ``checkpoint`` in fp32, eight samples a step.

    What the parser derives from a flag, and ``overrides`` may change, is reset to follow the override. A name that no
    run has is a ``TypeError``.
    """
    from slime.utils import accelerator

    values: dict[str, Any] = {
        "distributed_backend": accelerator.communication_backend(),
        "lr": 1e-3,
        "lr_decay_style": "constant",
        "adam_beta2": 0.98,
        "fp32": not overrides.get("bf16", False),
        "load": None,
        "ref_load": None,
        "num_rollout": 8,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "data_pad_size_multiplier": 8,
        "rollout_temperature": 0.7,
        "kl_loss_type": "low_var_kl",
        "eps_clip_high": 0.28,
        # derived from parallel sizes, --load and --weight-decay
        "padded_vocab_size": None,
        "expert_tensor_parallel_size": None,
        "finetune": False,
        "no_load_optim": False,
        "no_load_rng": False,
        "start_weight_decay": overrides.get("weight_decay", 0.01),
        "end_weight_decay": overrides.get("weight_decay", 0.01),
        **overrides,
    }
    args = copy.deepcopy(_parsed(str(checkpoint), (Path(checkpoint) / "config.json").read_text()))
    unknown = sorted(values.keys() - vars(args).keys() - {"disable_param_buffers_cpu_backup"})
    if unknown:
        raise TypeError(f"parsed arguments have no attribute {', '.join(unknown)}")
    vars(args).update(values)
    return args


@cache
def _parsed(checkpoint: str, config: str) -> argparse.Namespace:
    from slime.arguments import finalize_for_device, parse_args
    from slime.utils import accelerator
    from tools.tiny_model import megatron_flags

    required = (
        *("--hf-checkpoint", checkpoint, "--disable-rollout-global-dataset", "--rollout-max-response-len", "32"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--global-batch-size", "8"),
        *("--num-rollout", "8", "--rollout-num-gpus", "1", "--actor-num-gpus-per-node", "1"),
        *("--fp32", "--debug-train-only"),  # without an engine that is asked whether it can serve the checkpoint
    )
    args = parse_args([*required, *megatron_flags(checkpoint)])
    args.debug_train_only = False
    finalize_for_device(args, accelerator.device_type())
    return args


def make_train_data(
    *,
    prompts: int = 4,
    per_prompt: int = 2,
    vocab_size: int = 256,
    seed: int = 0,
    shortest: int = 3,
    longest: int = 24,
    scaled: bool = True,
    masked: Collection[int] = (),
) -> dict[str, list[Any]]:
    """Return train data of ``prompts * per_prompt`` random samples with prompts of 2 to 9 tokens and masked spans.

    Samples at the positions ``masked`` have no trained token.

    Engine log-probs are made up near those of a uniform policy; rewards are normalized within a prompt's group,
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
            mask[:] *= index not in masked
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
    from slime.batching.columns import RolloutColumns
    from slime.batching.schedule import build_dp_schedule

    batch = RolloutColumns.from_train_data(data)
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
