"""Rotary position embedding settings, checked against what the Hugging Face checkpoint says."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

# Megatron has these three of llama 3's scaling parameters fixed in its code.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEFAULT_SCALING_FACTOR = 8.0


def rope_settings(args: Namespace) -> dict[str, Any]:
    """Return GPTModel's rotary keyword arguments from the flags.

    Raises ValueError when ``<hf_checkpoint>/config.json`` describes a scaling that the flags do not, or one that
    Megatron has no implementation of.
    """
    scaling = args.use_rope_scaling
    factor = args.rope_scaling_factor
    settings = {
        "rotary_percent": _default(args.rotary_percent, 1.0),
        "rotary_base": _default(args.rotary_base, 10000),
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "rope_scaling": scaling,
        "rope_scaling_factor": _default(factor, DEFAULT_SCALING_FACTOR),
    }
    checkpoint = args.hf_checkpoint
    path = Path(checkpoint) / "config.json" if checkpoint else None
    if path is not None and path.is_file():
        _check(args, settings, path)
    return settings


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check(args: Namespace, settings: dict[str, Any], path: Path) -> None:
    config = json.loads(path.read_text())
    config = config.get("text_config", config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        if settings["rope_scaling"]:
            raise ValueError(
                f"--use-rope-scaling is set, but {path} describes a model without rope scaling: drop the flag"
            )
    elif kind == "llama3":
        _check_llama3(settings, rope, path)
    elif kind == "linear":
        if settings["seq_len_interpolation_factor"] != rope["factor"]:
            raise ValueError(
                f"{path} has linear rope scaling by {rope['factor']}: pass --rotary-seq-len-interpolation-factor "
                f"{rope['factor']} (seen: {settings['seq_len_interpolation_factor']})"
            )
    elif kind != "yarn" or not _has_yarn(args):
        raise ValueError(f"{path} has rope type {kind!r}, which the flags do not describe")


def _has_yarn(args: Namespace) -> bool:
    if args.multi_latent_attention:
        return args.rope_type != "rope"
    return args.position_embedding_type == "yarn"


def _check_llama3(settings: dict[str, Any], rope: dict[str, Any], path: Path) -> None:
    expected = {name: rope.get(name, value) for name, value in LLAMA3_FIXED.items()}
    if expected != LLAMA3_FIXED:
        raise ValueError(f"{path} has llama3 rope scaling with {expected}; Megatron implements only {LLAMA3_FIXED}")
    if not settings["rope_scaling"] or settings["rope_scaling_factor"] != rope["factor"]:
        raise ValueError(
            f"{path} has llama3 rope scaling by {rope['factor']}: pass --use-rope-scaling --rope-scaling-factor "
            f"{rope['factor']} (seen: --use-rope-scaling {settings['rope_scaling']}, factor "
            f"{settings['rope_scaling_factor']})"
        )
