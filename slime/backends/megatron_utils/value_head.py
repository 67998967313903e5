"""The critic's output: one number per position, in the place of a language model's output layer."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

NAME = "output_layer"
"""The attribute of megatron's GPTModel, and so the beginning of the head's names in checkpoints."""
DEFAULT_STD = 0.02


class ValueHead(torch.nn.Module):
    """Linear [hidden] -> 1 with a bias, computed in fp32 and called as megatron calls an output layer.

    Every tensor-parallel rank holds and computes the whole of it; under sequence parallelism each computes its part of
    the sequence and the parts are gathered. The first weights are drawn from N(0, ``std``), the bias is 0: equal on
    all ranks and in every layout.
    """

    def __init__(self, config: Any, *, std: float, seed: int) -> None:
        super().__init__()
        drawn = torch.empty(1, config.hidden_size).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(drawn.to(config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.sequence_parallel = bool(config.sequence_parallel)
        for parameter in (self.weight, self.bias):
            parameter.is_value_head = True
            if self.sequence_parallel:  # each rank has the gradient of its part: megatron adds them up
                parameter.sequence_parallel = True

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return (values [sequence, batch, 1], None) for ``hidden`` [sequence (this rank's part), batch, hidden]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        del weight, runtime_gather_output  # of output layers that share the embedding, or are split by vocabulary
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(args: Namespace, config: Any, model: torch.nn.Module) -> None:
    """Exchange the output layer of a last pipeline stage for a fresh ``ValueHead``.

    Raises ValueError for a model that has none, or whose output layer is its input embedding.
    """
    owner: Any = model if hasattr(model, NAME) else getattr(model, "language_model", None)
    if getattr(owner, NAME, None) is None:
        raise ValueError(
            f"the critic's model {type(model).__name__} has no {NAME} to put a value head in the place of; does the "
            "provider of --custom-model-provider-path return a whole last stage?"
        )
    if getattr(owner, "share_embeddings_and_output_weights", False):
        raise ValueError(
            f"the critic's model {type(model).__name__} computes its output with the input embedding, so that a value "
            "head would not be called; let its provider obey untie_embeddings_and_output_weights"
        )
    std = args.init_method_std or DEFAULT_STD
    setattr(owner, NAME, ValueHead(config, std=std, seed=args.seed))


def is_value_head(parameter: torch.nn.Parameter) -> bool:
    """Whether ``parameter`` belongs to a value head: Hugging Face checkpoints have nothing for it."""
    return bool(getattr(parameter, "is_value_head", False))


def checkpoint_has_value_head(directory: Path, hidden_size: int) -> bool:
    """Whether a Megatron checkpoint holds a value head for this hidden size, and not e.g. a language model's layer."""
    from megatron.core import dist_checkpointing

    saved = dist_checkpointing.load_tensors_metadata(str(directory)).get(f"{NAME}.weight")
    return saved is not None and tuple(saved.global_shape) == (1, hidden_size)
