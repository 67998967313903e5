"""The parameters of this rank under their global Megatron names, and what is known about the model they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import (
    Ranks,
    expert_parallel,
    expert_tensor_parallel,
    tensor_parallel,
    unwrap,
)
from slime.backends.megatron_utils.weights.layouts import Dims, Shape
from slime.backends.megatron_utils.weights.maps import Family, Rule, family_of
from slime.backends.megatron_utils.weights.maps.parts import LM_HEAD
from slime.backends.megatron_utils.weights.maps.rule import as_template
from slime.backends.megatron_utils.weights.merging import ADAPTER, merging
from slime.models.shape import gated_delta_net, padded_vocab_size
from slime.weights.hf.checkpoint import read_config

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

MTP = "mtp."
"""The beginning of the names of MTP parameters."""


@dataclass(frozen=True)
class Weight:
    """One parameter of this rank and where it belongs: ``hf_names`` of a layer (and expert) by ``rule``.

    A persistent buffer (the bias by which a router picks experts) counts as a parameter here. ``merge``: what makes of
    the parameter the weight with its adapter (``--lora-rank``), None without one.
    """

    name: str
    parameter: torch.Tensor
    rule: Rule
    layer: int | None
    expert: int | None
    hf_names: tuple[str, ...]
    merge: Callable[[torch.Tensor], torch.Tensor] | None = None

    def value(self) -> torch.Tensor:
        """Return the weight that the model computes with."""
        return self.parameter.detach() if self.merge is None else self.merge(self.parameter)

    @property
    def tensor_ranks(self) -> Ranks:
        """Return the group over which the parameter is split, if its layout is sharded."""
        return expert_tensor_parallel() if self.rule.is_expert else tensor_parallel()

    def hf_shapes(self, dims: Dims) -> list[Shape]:
        """Return the shapes of the tensors ``hf_names``."""
        shapes = self.rule.layout.hf_shapes(tuple(self.parameter.shape), self.tensor_ranks.size, dims)
        return [(dims.num_experts, *shape) for shape in shapes] if self.rule.is_stacked else shapes


def global_named_parameters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, parameter)`` of this rank's chunks, with layers and experts counted over the whole model from 0.

    After a chunk's parameters come its persistent buffers.
    """
    for chunk in model_chunks:
        model: Any = unwrap(chunk)
        numbers = {str(i): layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        first_expert = expert_parallel().rank * experts_per_rank(getattr(model, "config", None))
        for name, parameter in _parameters_and_buffers(model):
            head, layers, tail = name.partition("decoder.layers.")
            if layers and not head:
                local, _, rest = tail.partition(".")
                name = f"{layers}{numbers[local]}.{rest}"
            yield _with_global_expert(name, first_expert), parameter


def _parameters_and_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _with_global_expert(name: str, first_expert: int) -> str:
    template, layer, expert, _ = as_template(name)
    if expert is None:
        return name
    return template.format(layer=layer, expert=first_expert + expert)


def experts_per_rank(config: TransformerConfig) -> int:
    """Return how many routed experts of a layer a rank holds; 0 for a dense model."""
    return (getattr(config, "num_moe_experts", None) or 0) // expert_parallel().size


def tied(args: Args) -> bool:
    """Return whether input embedding and output layer are one tensor."""
    return not args.untie_embeddings_and_output_weights


def model_family(args: Args, hf_dir: str | Path | None = None) -> Family:
    """Return the family that ``--model-name`` names, else that of the checkpoint ``hf_dir`` (``args.hf_checkpoint``).

    slime <= 0.3.1 took the names of configuration classes (``qwen3config``), which are understood too.
    """
    given = args.model_name
    if given:
        return family_of(given.lower().removesuffix("config"))
    return family_of(read_config(hf_dir or args.hf_checkpoint).get("model_type", "missing"))


def model_dims(args: Args, config: TransformerConfig) -> Dims:
    """Return the sizes that layouts need, from the flags and Megatron's config."""
    padded = padded_vocab_size(args)
    vocab = args.vocab_size or padded
    experts = config.num_moe_experts or 0
    keys = gated_delta_net(vars(config).get).keys
    heads = (config.num_attention_heads, config.num_query_groups, config.kv_channels)
    return Dims(*heads, vocab, padded, experts, keys, *vars(config).get("shared_heads", ()))


def is_value_head(parameter: torch.Tensor) -> bool:
    """Return True if ``parameter`` belongs to a value head: Hugging Face checkpoints have nothing for it."""
    return bool(getattr(parameter, "is_value_head", False))


def weights_of(model_chunks: Sequence[torch.nn.Module], args: Args, family: Family) -> list[Weight]:
    """Return this rank's weights in the order of its modules.

    The output layer of a model with tied embeddings is the input embedding. Raises ValueError for a parameter that the
    family's map does not know. A critic's value head is left out: no family has one; so are the parameters of adapters.
    """
    weights, merges = [], merging(model_chunks)
    for name, parameter in global_named_parameters(model_chunks):
        if is_value_head(parameter) or f".{ADAPTER}." in name:
            continue
        rule, layer, expert, hf_names = hf_place(name, family, args.num_layers)
        if tied(args):
            hf_names = tuple(family.embedding if name == LM_HEAD else name for name in hf_names)
        weights.append(Weight(name, parameter, rule, layer, expert, hf_names, merges.get(id(parameter))))
    return weights


def hf_place(name: str, family: Family, num_layers: int) -> tuple[Rule, int | None, int | None, tuple[str, ...]]:
    """Return the rule of the global Megatron ``name``, its layer and expert on Hugging Face's side, and its tensors.

    ``num_layers``: those of the decoder, after which MTP layers are numbered on in some families.
    """
    rule, place = family.find(name)
    layer = place.layer
    if layer is not None and name.startswith(MTP) and family.mtp and family.mtp.pattern is None:
        layer += num_layers
    return rule, layer, place.expert, tuple(rule.hf_names(layer, place.expert, place.block))
