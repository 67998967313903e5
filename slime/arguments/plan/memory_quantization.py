"""How many bytes a weight takes in an engine: its type, or the quantisation of the checkpoint."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

DTYPES = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0}

# Bytes of a weight with its scales: fp8 has one fp32 scale per 128 x 128 block, 4-bit types one of 8 or 16 bits per
# 16 to 128 weights (an eighth of a bit to half a bit each).
EIGHT_BIT, FOUR_BIT = 1.0 + 4 / 128**2, 0.5 + 1 / 16
METHODS: dict[str, float] = {
    **dict.fromkeys(
        ("fp8", "w8a8_fp8", "modelopt_fp8", "mxfp8", "w8a8_int8", "auto-round-int8", "modelopt"), EIGHT_BIT
    ),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "moe_wna16", "bitsandbytes"), FOUR_BIT),
    **dict.fromkeys(("mxfp4", "modelopt_fp4", "nvfp4_online", "petit_nvfp4", "w4afp8", "mxfp_w4a8"), FOUR_BIT),
}
# Published models whose own checkpoints are quantised, by name.
PUBLISHED = {
    **dict.fromkeys(("deepseek-v3", "deepseek-v3-0324", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v3.2-exp"), "fp8"),
    **dict.fromkeys(("deepseek-r1", "deepseek-r1-0528", "deepseek-r1-zero", "minimax-m2"), "fp8"),
    **dict.fromkeys(("kimi-k2-instruct", "kimi-k2-instruct-0905", "kimi-k2-base"), "fp8"),
    "kimi-k2-thinking": "int4",
}
_IN_NAME = re.compile(r"[-_.](fp8|int4|bf16|fp16)$")
ONLY_EXPERTS = frozenset({"moe_wna16", "w4afp8", "mxfp4"})


@dataclass(frozen=True)
class WeightFormat:
    """``element``: bytes of an unquantised weight (embeddings, norms, router); ``bytes_per_weight``: of the others.

    ``experts_only``: only experts are quantised. ``name`` is what to call it; ``known`` is False when the
    quantisation is not one whose size is known here, and the weights are counted unquantised.
    """

    name: str
    element: float
    bytes_per_weight: float
    experts_only: bool = False
    known: bool = True


def weight_format(args: Namespace, hf_config: Mapping[str, Any] | None = None) -> WeightFormat:
    """Return the format of an engine's weights: ``--sglang-quantization``, or that of the checkpoint.

    A checkpoint says its own in ``hf_config``. Where it is not there, its name does (``Qwen3-4B-FP8``), or that of the
    published model; the dtype ``auto`` is otherwise taken for 16 bits.
    """
    chosen = getattr(args, "sglang_dtype", None) or "auto"
    if getattr(args, "fp16", False):
        chosen = "float16"
    element = DTYPES.get(chosen, 2.0)
    name = {2.0: "fp16" if chosen in ("float16", "half") else "bf16", 4.0: "fp32"}[element]
    stored = (hf_config or {}).get("quantization_config") or {}
    method = getattr(args, "sglang_quantization", None) or stored.get("quant_method")
    if method in (None, "unquant"):
        by_name = None if method else quantization_by_name(getattr(args, "hf_checkpoint", None) or "")
        if by_name == "fp8":
            return WeightFormat("fp8, by the checkpoint's name", element, EIGHT_BIT)
        if by_name == "int4":
            experts = any(key in (hf_config or {}) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
            return WeightFormat("int4, by the checkpoint's name", element, FOUR_BIT, experts_only=experts)
        return WeightFormat(name, element, element)
    if method in ("compressed-tensors", "quark"):
        return _described(str(method), element, stored)
    size = METHODS.get(method)
    if size is None:
        return WeightFormat(method, element, element, known=False)
    return WeightFormat(method, element, size, experts_only=method in ONLY_EXPERTS)


def quantization_by_name(checkpoint: str) -> str | None:
    """Return the quantisation that the name of a checkpoint's directory says, of the published model if need be."""
    name = PurePath(checkpoint).name.lower()
    found = _IN_NAME.search(name)
    return found.group(1) if found else PUBLISHED.get(name)


def _described(method: str, element: float, stored: Mapping[str, Any]) -> WeightFormat:
    """A checkpoint that describes its quantisation group by group: bits of the weights, and what is left out."""
    groups = [group for group in (stored.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    bits = [int((group.get("weights") or {}).get("num_bits") or 0) for group in groups]
    known = {8: EIGHT_BIT, 4: FOUR_BIT}
    if not bits or bits[0] not in known:
        return WeightFormat(method, element, element, known=False)
    left_out = " ".join(map(str, stored.get("ignore") or []))
    only_experts = "attn" in left_out and "shared" in left_out
    return WeightFormat(f"{method} of {bits[0]} bits", element, known[bits[0]], experts_only=only_experts)
