"""Shared parts of tests of the whole loop on a GPU: a model of a real shape, flags of engines, memory of the device."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from tools.tiny_model import make_tiny_checkpoint

QWEN3_600M = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 4096,
}  # fmt: skip
"""The shape of Qwen3-0.6B."""


def checkpoint_600m(out: Path) -> Path:
    """Write a bf16 checkpoint of that shape with random weights (1.2 GB) to ``out``; return it."""
    return make_tiny_checkpoint(out, dtype="bfloat16", **QWEN3_600M)


def engine_flags() -> list[str]:
    """Return the flags of an engine on this host: SGLang's own choices, or kernels of Triton and torch.

    The latter where the kernel package has been cut down to what these need (no FlashAttention 3, no xgrammar).
    """
    flags = ["--sglang-mem-fraction-static", "0.3", "--sglang-cuda-graph-max-bs-decode", "256"]
    package = importlib.util.find_spec("sgl_kernel")
    folders = (package.submodule_search_locations if package else None) or []
    if not [path for folder in folders for path in Path(folder).glob("flash_ops*.so")]:
        flags += ["--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"]
    if importlib.util.find_spec("xgrammar") is None:
        flags += ["--sglang-grammar-backend", "none"]
    return flags


def memory_in_use() -> int:
    """Return the bytes of the first GPU that all processes hold; asked for without making a context in this one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) * 2**20
