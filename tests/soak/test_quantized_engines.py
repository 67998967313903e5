"""Pushes in every format against engines of the converted checkpoint, of dense models and of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.weights.quantization import Format, Fp8, Int4
from tests.integration.test_quantized_push import MOE, SIZES, compare, serving

pytestmark = pytest.mark.integration

BLOCKS = Fp8((128, 128), "block")
DENSE = {"tie_word_embeddings": False, **SIZES}
EXPERTS = {**MOE, **SIZES}
TP2, EP2 = ("--tensor-model-parallel-size", "2"), ("--expert-model-parallel-size", "2")


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize(
    ("form", "family"),
    [
        (Fp8(), "qwen3"),
        (Fp8(ue8m0=True), "qwen3"),
        (Fp8((128, 128), "block", ue8m0=True), "qwen3"),
        (BLOCKS, "qwen3_moe"),
        (Int4(32), "qwen3"),
        (Int4(128), "qwen3_moe"),
        (Int4(64, symmetric=False), "qwen3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_push_is_a_load_of_the_converted_checkpoint(
    form: Format, family: str, colocate: bool, tmp_path: Path
) -> None:
    sizes, flags = (DENSE, TP2) if family == "qwen3" else (EXPERTS, EP2)
    with serving(tmp_path, form, family, **sizes) as stored:
        compare(stored, tmp_path, colocate=colocate, flags=flags, wrong=0.3)
