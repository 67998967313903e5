"""The critic's value head, in the place of the language model's output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

VALUE_HEAD = "output_layer"
"""The attribute of megatron's GPTModel, and so the beginning of the head's names in checkpoints."""

DEFAULT_STD = 0.02


class ValueHead(torch.nn.Module):
    """Linear [hidden] -> 1 with a bias, computed in fp32 and called as megatron calls an output layer.

    Every tensor-parallel rank holds and computes the whole of it; under sequence parallelism each computes its part of
    the sequence and the parts are gathered. The first weights are drawn from N(0, ``std``), the bias is 0: equal on
    all ranks and in every layout.
    """

    def __init__(self, config: TransformerConfig, *, std: float, seed: int) -> None:
        super().__init__()
        drawn = torch.empty(1, config.hidden_size).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(drawn.to(config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.sequence_parallel = bool(config.sequence_parallel)
        for parameter in (self.weight, self.bias):
            setattr(parameter, "is_value_head", True)  # noqa: B010  (unknown to torch)
            if self.sequence_parallel:  # each rank has the gradient of its part: megatron adds them up
                setattr(parameter, "sequence_parallel", True)  # noqa: B010

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


def put_value_head(args: Args, config: TransformerConfig, model: torch.nn.Module) -> None:
    """Exchange the output layer of a last pipeline stage for a fresh ``ValueHead``.

    Raises ValueError for a model that has none, or whose output layer is its input embedding.
    """
    owner: Any = model if hasattr(model, VALUE_HEAD) else getattr(model, "language_model", None)
    if getattr(owner, VALUE_HEAD, None) is None:
        raise ValueError(
            f"the critic's model {type(model).__name__} has no {VALUE_HEAD} that a value head could replace; does the "
            "provider of --custom-model-provider-path return a whole last stage?"
        )
    if getattr(owner, "share_embeddings_and_output_weights", False):
        raise ValueError(
            f"the critic's model {type(model).__name__} computes its output with the input embedding, so that a value "
            "head would not be called; let its provider obey untie_embeddings_and_output_weights"
        )
    std = args.init_method_std or DEFAULT_STD
    setattr(owner, VALUE_HEAD, ValueHead(config, std=std, seed=args.seed))
