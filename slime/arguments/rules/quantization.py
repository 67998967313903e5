"""Quantized checkpoints: whether engines of one can be sent weights, and training with weights rounded like it, or with
matrix products in FP8, which TransformerEngine computes."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import models_of
from slime.models.facts import quantization_by_name
from slime.weights.hf.checkpoint import quantization_of

FAKE_INT4, GROUP_SIZE = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"
"""The variables that asked slime <= 0.3.1 for rounded weights in training."""
FP8_DETAILS = ("fp8_*", "tp_only_amax_red", "first_last_layers_bf16", "num_layers_at_*_in_bf16")
"""Attributes of the flags that say something of --fp8-format."""
FP8_ROWS = {"blockwise": 128, "mxfp8": 32}
"""Recipe of FP8 -> what the tokens of a product are a multiple of; 16 with the others."""


def check_pushes(args: Args) -> None:
    """Refuse a quantized checkpoint whose engines could not be sent weights; a dry run lists it."""
    if args.debug_train_only or args.debug_rollout_only or not args.rollout_num_gpus:
        return
    checkpoint, given = args.hf_checkpoint, f"--hf-checkpoint {args.hf_checkpoint}"
    for model in models_of(args) or ():
        if model.update_weights and model.model_path is not None and model.model_path != checkpoint:
            checkpoint = model.model_path
            given = f"--sglang-config {args.sglang_config}: {checkpoint} of model {model.name}"
    method, can_be_pushed = _quantization(checkpoint)
    if checkpoint != args.hf_checkpoint:
        can_be_pushed = False  # weights are pushed as --hf-checkpoint stores them
    elif method is None or (can_be_pushed and not args.rollout_external):
        return
    if method is None:
        method, can_be_pushed = _quantization(args.hf_checkpoint)
        given = f"--hf-checkpoint {args.hf_checkpoint}, unlike the checkpoint of the engines,"
    if method is None:
        return
    message = (
        f"{given} is quantized ({method}): pushing weights in this format is not available yet in this version, only "
        "FP8 (e4m3 in blocks or per tensor) and INT4 (pack-quantized, in groups) of --hf-checkpoint to engines of the "
        "run are; give a bf16 checkpoint"
    )
    if not args.dry_run:
        raise ArgumentError(message)
    args.not_available.append(message)


def _quantization(checkpoint: str) -> tuple[str | None, bool]:
    """The quantization that ``config.json`` names, and whether engines can be sent weights in it.

    Where there is no ``config.json`` the name of the directory says it.
    """
    described = _described(checkpoint)
    if described is None:
        method = quantization_by_name(checkpoint)
        return (None if method in ("bf16", "fp16") else method), method in ("fp8", "int4")
    if described.get("quant_method") is None:
        return None, False
    method = described["quant_method"]
    if method == "fp8":
        fmt, activations = described.get("fmt", "e4m3"), described.get("activation_scheme", "dynamic")
        return method, (fmt, activations) == ("e4m3", "dynamic")
    weights = _groups(described)
    kind = tuple(weights.get(key) for key in ("type", "num_bits", "strategy"))
    return method, kind == ("int", 4, "group") and not weights.get("actorder")


def _described(checkpoint: str) -> dict[str, Any] | None:
    """``quantization_config`` of the checkpoint, empty where it has none; None where there is no ``config.json``."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        return None
    described = quantization_of(json.loads(path.read_text()))
    return described if isinstance(described, dict) else {}


def _groups(described: dict[str, Any]) -> dict[str, Any]:
    """Return what compressed-tensors states for the weights of all quantized layers; empty where they differ."""
    groups = list((described.get("config_groups") or {}).values())
    return (groups[0].get("weights") or {}) if len(groups) == 1 else {}


def check_training(args: Args) -> None:
    """Read the variables by which training with rounded INT4 weights was asked for, and refuse what cannot be."""
    variables = {**os.environ, **args.train_env_vars}
    by_variable, size = variables.get(FAKE_INT4, "0") == "1", str(variables.get(GROUP_SIZE, "128"))
    if not size.isdecimal() or not int(size):
        raise ArgumentError(f"--train-env-vars {GROUP_SIZE} {size}: expected a number of columns, such as 128 or 32")
    args.int4_group_size = int(size)
    args.quantization_aware_training = args.quantization_aware_training or by_variable
    if not args.quantization_aware_training or args.debug_rollout_only:
        return
    given = f"--train-env-vars {FAKE_INT4} 1" if by_variable else "--quantization-aware-training"
    described = _described(args.hf_checkpoint)
    if described is None:
        return  # said where the checkpoint is checked
    weights, method = _groups(described), described.get("quant_method")
    if by_variable and method is not None and weights.get("group_size") != args.int4_group_size:
        raise ArgumentError(
            f"{given} with {GROUP_SIZE} {args.int4_group_size}: --hf-checkpoint {args.hf_checkpoint} is quantized in "
            f"{method} with groups of {weights.get('group_size')}; give the group size of the checkpoint, or "
            "--quantization-aware-training, which rounds as it does"
        )
    if not by_variable and method is None:
        raise ArgumentError(
            f"{given} rounds weights as --hf-checkpoint stores them, and {args.hf_checkpoint} is not quantized; give a "
            "quantized one there, and the bf16 one to --ref-load or --load"
        )
    if args.lora_rank:
        raise ArgumentError(
            f"{given}: engines of a quantized model add adapters (--lora-rank) to rounded weights that do not change; "
            "leave one of them out"
        )


def check_fp8(args: Args) -> None:
    """Refuse what TransformerEngine could not compute; that it is installed is seen where the trainers start."""
    args.fp8_param_gather = False  # without effect, as a warning has said
    if args.fp8 is None:
        names = (name for name in sorted(args.explicit_flags) if any(fnmatchcase(name, part) for part in FP8_DETAILS))
        if name := next(names, None):
            option = "--no-fp8-wgrad" if name == "fp8_wgrad" else "--" + name.replace("_", "-")
            raise ArgumentError(f"{option} says how --fp8-format computes, which is not given; add it, or leave it out")
        return
    if args.debug_rollout_only:
        return
    if args.transformer_impl != "transformer_engine":
        raise ArgumentError(
            f"--fp8-format {args.fp8}: TransformerEngine computes products in FP8, and --transformer-impl is "
            f"{args.transformer_impl}; leave one of them out"
        )
    if args.fp16 or args.fp32:
        raise ArgumentError(
            f"--fp8-format {args.fp8} goes with weights in bf16, got --{'fp16' if args.fp16 else 'fp32'}; leave it out"
        )
    rows, multiple = FP8_ROWS.get(args.fp8_recipe, 16), args.data_pad_size_multiplier
    if multiple % rows:
        raise ArgumentError(
            f"--fp8-recipe {args.fp8_recipe} needs tokens in multiples of {rows}: --data-pad-size-multiplier is "
            f"{multiple}; give a multiple of {rows}"
        )
