"""Choose the weights of a checkpoint to quantize, and the format, by its configuration and the tensors that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime.weights.hf.checkpoint import HfCheckpoint, quantization_of, read_config
from slime.weights.quantization.formats import Format, Fp8, Int4

NEVER = (
    *("norm", "embed", "router", ".gate.", "shared_expert_gate", "lm_head", "eh_proj", "weights_proj"),
    *("conv1d", "A_log", "dt_bias", "in_proj_a", "in_proj_b", "visual.", "vision"),
)
"""Weights with one of these in their names are no linear layers, or too small or too sensitive to be quantized."""


def read_format(described: Mapping[str, Any]) -> Format:
    """Return the format that ``described``, a ``quantization_config``, names.

    Raises ValueError for one that the quantizer does not have.
    """
    method = described.get("quant_method")
    if method == "fp8":
        if described.get("fmt", "e4m3") != "e4m3" or described.get("activation_scheme", "dynamic") != "dynamic":
            raise ValueError(
                f"FP8 weights are available as e4m3 with dynamic activations, got fmt {described.get('fmt')} and "
                f"activation_scheme {described.get('activation_scheme')}"
            )
        block = described.get("weight_block_size")
        ue8m0 = described.get("scale_fmt") == "ue8m0"
        return Fp8((block[0], block[1]), "block", ue8m0) if block else Fp8(ue8m0=ue8m0)
    groups = list((described.get("config_groups") or {}).values())
    if method == "compressed-tensors" and len(groups) == 1:
        weights = groups[0].get("weights") or {}
        kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind == ("int", 4, "group") and not weights.get("actorder"):
            return Int4(weights["group_size"], weights.get("symmetric", True))
        if kind in (("float", 8, "channel"), ("float", 8, "tensor")):
            return Fp8(per=kind[2])
    raise ValueError(
        f"quantization {method!r} is not available: expected fp8, or compressed-tensors with one group of int 4-bit "
        "weights in groups or float 8-bit ones per channel or tensor"
    )


@dataclass(frozen=True)
class Quantizer:
    """Makes the tensors of a quantized checkpoint from weights; ``selects``: whether the weight NAME is quantized."""

    format: Format
    selects: Callable[[str, Sequence[int]], bool]

    @classmethod
    def of_checkpoint(cls, path: str | Path) -> Quantizer | None:
        """Return what makes exactly the tensors of the checkpoint ``path``; None where it is not quantized.

        A weight that the checkpoint does not have is taken as its configuration says, but for stacked experts, which
        it has one by one then: asked for those it raises ValueError, as this does for a format that is not available.
        """
        described = quantization_of(read_config(path))
        if described is None:
            return None
        form = read_format(described)
        with HfCheckpoint(path) as checkpoint:
            names = checkpoint.names
            if isinstance(form, Int4):  # not the dtype that the trainer computes in
                scale = next((name for name in sorted(names) if name.endswith("weight_scale")), None)
                form = replace(form, scale_dtype=None if scale is None else checkpoint.tensor(scale).dtype)
        quantized = frozenset(name.removesuffix(form.marker) for name in names if name.endswith(form.marker))
        by_rules = rules_of(described)

        def selects(name: str, shape: Sequence[int]) -> bool:
            if name in quantized or name in names:
                return name in quantized
            if len(shape) > 2:
                raise ValueError(
                    f"{path} has no {name} {tuple(shape)}: it stores the quantized experts one by one, and the trainer "
                    "has them stacked; give a bf16 checkpoint"
                )
            return by_rules(name, shape)

        return cls(form, selects)

    def quantize(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the checkpoint that the weight ``name`` becomes: itself where it is not quantized."""
        if not self.selects(name, weight.shape):
            yield name, weight
            return
        try:
            parts = self.format.quantize(weight)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
        yield from ((name + suffix, part) for suffix, part in parts.items())

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of all ``weights``, one weight after the other."""
        for name, weight in weights:
            yield from self.quantize(name, weight)


def rules_of(described: Mapping[str, Any]) -> Callable[[str, Sequence[int]], bool]:
    """Return whether a weight is quantized by ``described``, a ``quantization_config``."""
    ignored = [str(rule) for key in ("ignored_layers", "modules_to_not_convert", "ignore")
               for rule in described.get(key) or ()]  # fmt: skip

    def selects(name: str, shape: Sequence[int]) -> bool:
        return is_linear(name, shape) and not any(ignores(rule, name) for rule in ignored)

    return selects


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Return True if the tensor ``name`` is the weight of a linear layer that quantized checkpoints quantize."""
    return name.endswith(".weight") and len(shape) == 2 and not any(word in name for word in NEVER)


def ignores(rule: str, name: str) -> bool:
    """Return True if ``rule`` of an ignore list names the weight ``name``, its module, or one that contains that.

    ``re:PATTERN`` matches from the beginning; other rules are whole parts of a path: ``layers.1`` is not ``layers.10``.
    """
    module = name.removesuffix(".weight")
    if rule.startswith("re:"):
        return any(re.match(rule[3:], text) for text in (name, module))
    return f".{rule.rstrip('.')}." in f".{module}."
