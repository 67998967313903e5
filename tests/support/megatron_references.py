"""Tiny checkpoints of every family with tensors that all differ, and what transformers computes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.megatron_model import output_gradient, sequences
from tools.tiny_model import make_tiny_checkpoint

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# The vocabulary of "qwen3-padded" is no multiple of 128: its last rows are padding, under TP2 all on the last rank.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3-padded": ("qwen3", {"tie_word_embeddings": False, "vocab_size": 300, "head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3-rope": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "max_position_embeddings": 16384},
    ),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": False}),
    # A dense layer between two with experts, which also have an expert that every token passes.
    "qwen2_moe": ("qwen2_moe", {"tie_word_embeddings": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
}
WITH_EXPERTS = ("qwen3_moe", "qwen2_moe")


class Reference(NamedTuple):
    """Results of transformers for a checkpoint: ``logits [tokens, vocab]``, weights and gradients by name."""

    logits: torch.Tensor
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def make_checkpoints(folder: Path) -> dict[str, str]:
    """Write all MODELS below ``folder``; return their paths."""
    made = {}
    for name, (family, options) in MODELS.items():
        made[name] = str(make_tiny_checkpoint(folder / name, family, **options))
        _randomize(Path(made[name]))
    return made


def _randomize(checkpoint: Path) -> None:
    """Give every tensor values of its own: fresh checkpoints have all norms one and all biases zero."""
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise if name.endswith("bias") else 0.15 * noise
    save_file(tensors, path, metadata={"format": "pt"})


def reference(checkpoint: str, dtype: torch.dtype = torch.float32) -> Reference:
    """Return logits and gradients by transformers and autograd, one sequence after the other, without padding."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    logits = torch.cat([model(s[None]).logits[0] for s in sequences(model.config.vocab_size)])
    (logits * output_gradient(model.config.vocab_size)).sum().backward()
    weights = load_file(Path(checkpoint) / "model.safetensors")
    gradients = [pair for n, p in model.named_parameters() for pair in as_stored(n, p.grad)]
    return Reference(logits.detach(), weights, dict(gradients))


def as_stored(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor under the names of the checkpoint: in memory, transformers stacks the experts of a layer."""
    prefix, experts, kind = name.partition(".experts.")
    if not experts:
        return [(name, tensor)]
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return [
        (f"{prefix}.experts.{expert}.{k}.weight", part)
        for expert, whole in enumerate(tensor)
        for k, part in zip(kinds, whole.chunk(len(kinds)), strict=True)
    ]
