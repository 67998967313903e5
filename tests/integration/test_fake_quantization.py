"""Training with rounded weights is training of the model that the converted files describe, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slime.weights.hf.checkpoint import HfCheckpoint
from slime.weights.quantization import Format, Fp8, Int4
from slime.weights.quantization.files import quantize_checkpoint
from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
INT4, INT4_ZEROS, BLOCKS = Int4(32), Int4(32, symmetric=False), Fp8((16, 32), "block")
EP2 = (*TP2, "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1)
CASES: dict[str, tuple[str, Format, tuple[Any, ...]]] = {
    "int4": ("qwen3", INT4, TP2),
    "fp8": ("qwen3", BLOCKS, TP2),
    "int4-experts": ("qwen3_moe", INT4_ZEROS, EP2),
}
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)


def slow_weights(quantized: Path, form: Format) -> dict[str, torch.Tensor]:
    """Return the weights that the files hold in fp32, unpacked number by number."""
    weights: dict[str, torch.Tensor] = {}
    with HfCheckpoint(quantized) as files:
        for name in files.names:
            if name.endswith("weight_packed"):
                weight = name.removesuffix("_packed")
                packed, scale = files.tensor(name).numpy().astype(np.uint32), files.tensor(f"{weight}_scale").numpy()
                numbers = np.stack([(packed >> (4 * i)) & 15 for i in range(8)], -1).reshape(packed.shape[0], -1)
                zeros = np.full(scale.shape, 8, np.int64)
                if f"{weight}_zero_point" in files.names:
                    stored = files.tensor(f"{weight}_zero_point").numpy().astype(np.uint32)
                    zeros = np.stack([(stored[r // 8] >> (4 * (r % 8))) & 15 for r in range(scale.shape[0])])
                signed = numbers.astype(np.int64) - zeros.astype(np.int64).repeat(32, 1)
                weights[weight] = torch.from_numpy(signed.astype(np.float32) * scale.repeat(32, 1))
            elif name.endswith("weight_scale_inv"):
                weight = name.removesuffix("_scale_inv")
                scale = files.tensor(name).numpy().repeat(16, 0).repeat(32, 1)
                weights[weight] = files.tensor(weight).float() * torch.from_numpy(scale)
            elif not name.endswith(("_scale", "_shape", "_zero_point")) and f"{name}_scale_inv" not in files.names:
                weights[name] = files.tensor(name)
    return weights


def test_rounded_layers_are_those_of_the_converted_files(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 128, "tie_word_embeddings": False}
    runs, plain = [], {}
    for case, (family, form, flags) in CASES.items():
        plain[case] = make_tiny_checkpoint(tmp_path / case, family, **sizes)
        quantize_checkpoint(plain[case], quantized := tmp_path / f"{case}-quantized", form)
        slow = make_tiny_checkpoint(tmp_path / f"{case}-slow", family, **sizes)
        save_file(slow_weights(quantized, form), slow / "model.safetensors", metadata={"format": "pt"})
        qat = ("--quantization-aware-training", *flags, *(RECOMPUTED if case == "int4" else ()))
        runs += [
            {"checkpoint": str(quantized), "weights": str(plain[case]), "flags": [str(f) for f in qat]},
            {"checkpoint": str(slow), "weights": str(slow), "flags": [str(f) for f in flags]},
        ]
    ranks = run_distributed("tests.support.rounded_training:passes", 2, {"cases": runs}, timeout=200)
    for number, case in enumerate(CASES):
        rounded, of_files = ([rank[2 * number + i] for rank in ranks] for i in range(2))
        assert torch.equal(*(assemble([rank["forward"] for rank in run], 384) for run in (rounded, of_files))), case
        for ours, slow_run in zip(rounded, of_files, strict=True):
            assert ours["gradients"].keys() == slow_run["gradients"].keys()
            for name, gradient in ours["gradients"].items():
                assert torch.equal(gradient, slow_run["gradients"][name]), (case, name)
            with HfCheckpoint(plain[case]) as exact:  # masters and pushes start from exact weights
                assert all(torch.equal(weight, exact.tensor(name)) for name, weight in ours["pushed"].items())
            assert any(not torch.equal(weight, slow_run["pushed"][name]) for name, weight in ours["pushed"].items())
