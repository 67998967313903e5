"""One whole Megatron parameter as Hugging Face tensors, for code that gathers parameters itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.weights.layouts import Dims, Vocabulary
from slime.backends.megatron_utils.weights.maps import family_of
from slime.backends.megatron_utils.weights.naming import hf_place
from slime.weights.quantization import Quantizer, read_format
from slime.weights.quantization.quantizer import rules_of

Pairs = list[tuple[str, torch.Tensor]]
CONVERTERS = {
    "convert_deepseekv3_to_hf": ("deepseek_v3",),
    "convert_glm4_to_hf": ("glm4",),
    "convert_glm4moe_to_hf": ("glm4_moe",),
    "convert_llama_to_hf": ("llama",),
    "convert_mimo_to_hf": ("mimo",),
    "convert_minimax_m2_to_hf": ("minimax_m2",),
    "convert_qwen2_to_hf": ("qwen2", "qwen3"),
    "convert_qwen3_5_to_hf": ("qwen3_5", "qwen3_5_moe"),
    "convert_qwen3_next_to_hf": ("qwen3_next",),
    "convert_qwen3moe_to_hf": ("qwen3_moe", "qwen2_moe"),
}
"""Functions ``(args, name, param)``, and the families whose parameters each takes."""


def convert_to_hf(
    args: Args, model_name: str, name: str, param: torch.Tensor, quantization_config: Mapping[str, Any] | None = None
) -> Pairs:
    """Return (Hugging Face name, tensor) pairs of the parameter ``name``, gathered over all tensor-parallel ranks.

    ``name`` counts layers and experts over the whole model; ``module.`` before it is dropped. ``model_name``: a family
    such as ``qwen3`` or its configuration class. ``args`` gives heads, groups, ``kv_channels`` and ``vocab_size``, to
    which the vocabulary is cut. With ``quantization_config``, as ``config.json`` has it, what that does not ignore
    becomes the tensors of such a checkpoint. Raises ValueError for a family or parameter without a map, for experts
    that the family stores in one tensor per layer, and for a quantization that is not available.
    """
    name = strip_param_name_prefix(name)
    if name.startswith("model.visual."):
        return [(name, param)]
    family = family_of(model_name.lower().removesuffix("config"))
    rule, _, _, names = hf_place(name, family, args.num_layers)
    if rule.is_stacked:
        raise ValueError(f"{family.name} stores the experts of a layer in one tensor: {name} alone makes none of them")
    pairs = list(zip(names, rule.layout.unshard([param], _dims(args, param)), strict=True))
    if quantization_config:
        quantizer = Quantizer(read_format(quantization_config), rules_of(quantization_config))
        pairs = list(quantizer.stream(pairs))
    return pairs


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the first ``vocab_size`` rows of the embedding and the output layer, and other parameters as they are."""
    padded = strip_param_name_prefix(name) in ("embedding.word_embeddings.weight", "output_layer.weight")
    return Vocabulary().unshard([param], Dims(1, 1, 1, vocab_size, vocab_size))[0] if padded else param


def strip_param_name_prefix(name: str) -> str:
    """Return ``name`` without the ``module.`` of the wrappers around a model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def __getattr__(name: str) -> Callable[[Args, str, torch.Tensor], Pairs]:
    if name not in CONVERTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_convert, CONVERTERS[name])


def _convert(families: Sequence[str], args: Args, name: str, param: torch.Tensor) -> Pairs:
    known = (family for family in families if family_of(family).knows(strip_param_name_prefix(name)))
    return convert_to_hf(args, next(known, families[0]), name, param)


def _dims(args: Args, param: torch.Tensor) -> Dims:
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    channels = args.kv_channels or args.hidden_size // heads
    vocab = args.vocab_size or param.shape[0]
    return Dims(heads, groups, channels, vocab, max(vocab, param.shape[0] if param.ndim else 1), args.num_experts or 0)
