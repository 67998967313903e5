"""The parameters of this rank under their global Megatron names, and what is known about the model they belong to."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.model_provider import padded_vocab_size
from slime.backends.megatron_utils.weights.hf_checkpoint import read_config
from slime.backends.megatron_utils.weights.layouts import Dims
from slime.backends.megatron_utils.weights.maps import Family, Rule, family_of
from slime.backends.megatron_utils.weights.maps.dense import EMBEDDING, LM_HEAD


@dataclass(frozen=True)
class Weight:
    """One parameter of this rank and where it belongs: ``hf_names`` of layer ``layer`` by ``rule``."""

    name: str
    parameter: torch.nn.Parameter
    rule: Rule
    layer: int | None
    hf_names: tuple[str, ...]


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside ``DistributedDataParallel`` and ``Float16Module``."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    return model


def global_named_parameters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield ``(name, parameter)`` of this rank's chunks, with layer numbers counted over the whole model from 0."""
    for chunk in model_chunks:
        model: Any = unwrap(chunk)
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        for name, parameter in model.named_parameters():
            head, layers, tail = name.partition("decoder.layers.")
            if layers and not head:
                local, _, rest = tail.partition(".")
                name = f"{layers}{numbers[local]}.{rest}"
            yield name, parameter


def tied(args: Namespace) -> bool:
    """Return whether input embedding and output layer are one tensor."""
    return not getattr(args, "untie_embeddings_and_output_weights", False)


def model_family(args: Namespace, hf_dir: str | Path | None = None) -> Family:
    """Return the family that ``--model-name`` names, else that of the checkpoint ``hf_dir`` (``args.hf_checkpoint``).

    slime <= 0.3.1 took the names of configuration classes (``qwen3config``), which are understood too.
    """
    given = getattr(args, "model_name", None)
    if given:
        return family_of(given.lower().removesuffix("config"))
    return family_of(read_config(hf_dir or args.hf_checkpoint).get("model_type", "missing"))


def model_dims(args: Namespace, config: Any) -> Dims:
    """Return the sizes that layouts need, from the flags and Megatron's config."""
    padded = padded_vocab_size(args)
    vocab = getattr(args, "vocab_size", None) or padded
    return Dims(config.num_attention_heads, config.num_query_groups, config.kv_channels, vocab, padded)


def weights_of(model_chunks: Sequence[torch.nn.Module], args: Namespace, family: Family) -> list[Weight]:
    """Return this rank's weights in the order of its modules.

    The output layer of a model with tied embeddings is the input embedding. Raises ValueError for a parameter that the
    family's map does not know.
    """
    weights = []
    for name, parameter in global_named_parameters(model_chunks):
        rule, layer = family.find(name)
        hf_names = tuple(rule.hf_names(layer))
        if tied(args):
            hf_names = tuple(EMBEDDING if name == LM_HEAD else name for name in hf_names)
        weights.append(Weight(name, parameter, rule, layer, hf_names))
    return weights
