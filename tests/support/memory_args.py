"""Namespaces for the tests of model sizes and memory: bare ones by hand, and those of published models by parsing."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from tests.support.arguments import known, run_args

PLAIN: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 16,
    "vocab_size": 1024,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "seq_length": 4096,
    # of the shortest command line, which says more than an estimate needs
    "gated_linear_unit": False,
    "use_rotary_position_embeddings": False,
    "padded_vocab_size": None,
    "qk_layernorm": False,
    "global_batch_size": None,
    "rollout_max_response_len": None,
    "rollout_num_gpus": None,
    "hf_checkpoint": "",
}


def bare_args(**values: Any) -> Namespace:
    """Return parsed arguments for a tiny gated model with grouped queries, and ``values``."""
    return run_args(**{**PLAIN, **values})


def published_args(name: str, *flags: Any) -> Namespace:
    """Return what a dry run resolves for the published model ``name`` and ``flags``."""
    from slime.arguments.parse import resolve
    from slime.models.facts import known_config
    from slime.models.megatron_flags import megatron_flags

    config = known_config(name)
    assert config is not None
    words = [
        *("--hf-checkpoint", f"/not/here/{name}", "--prompt-data", "/not/here/prompts.jsonl", "--rm-type", "math"),
        *("--rollout-batch-size", 32, "--n-samples-per-prompt", 8, "--global-batch-size", 256, "--num-rollout", 1),
        *("--custom-generate-function-path", "own.generate"),  # it needs no limit of responses; tests give one or none
        *("--dry-run", *megatron_flags(config), *flags),
    ]
    return resolve([str(word) for word in words], *known())


def meta_parameters(config: dict[str, Any]) -> int:
    """Count the parameters of the transformers model that ``config`` describes; no weights are allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())
