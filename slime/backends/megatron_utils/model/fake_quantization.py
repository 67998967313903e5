"""Quantization-aware training: linear layers compute with weights rounded as engines have them.

The gradient by the rounded weight is applied to the exact one (straight-through, Bengio et al. 2013, arXiv:1308.3432).
What is rounded, and how, is what a push does (``slime.weights.quantization``), on all layers that the model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import Ranks, expert_tensor_parallel, tensor_parallel
from slime.backends.megatron_utils.weights.layouts import Dims, QueryKeyValue, RowParallel, Vocabulary
from slime.backends.megatron_utils.weights.maps import Rule
from slime.backends.megatron_utils.weights.naming import (
    global_named_parameters,
    hf_place,
    model_dims,
    model_family,
)
from slime.weights.quantization import Format, Int4, Quantizer
from slime.weights.quantization.files import ONLY_EXPERTS
from slime.weights.quantization.quantizer import rules_of


@dataclass(frozen=True)
class Rounding:
    """Rounding of a Megatron weight (this rank's part): as the Hugging Face tensors that it is made of.

    ``rows``: of each tensor, and ``chosen``: whether it is quantized. ``order [rows]``: which row of the tensors, one
    below the other, is where in the weight; None: in order.
    """

    form: Format
    rows: tuple[int, ...]
    chosen: tuple[bool, ...]
    order: torch.Tensor | None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its dtype."""
        if self.order is None:
            in_order = weight
        else:
            order = self.order.to(weight.device)
            in_order = torch.empty_like(weight).index_copy_(0, order, weight)
        parts = in_order.split(self.rows)
        rounded = torch.cat([self.form.rounded(p) if c else p for p, c in zip(parts, self.chosen, strict=True)])
        return rounded if self.order is None else rounded.index_select(0, order)


class StraightThrough(torch.autograd.Function):
    """``rounding(weight)``, whose gradient is that of ``weight``."""

    @staticmethod
    def forward(ctx: object, weight: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(weight.detach())

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def quantizer_in_training(args: Args) -> Quantizer | None:
    """Return what rounds the weights in training; None without ``--quantization-aware-training``.

    That of ``--hf-checkpoint``, and where that is not quantized INT4 for routed experts, of ``--int4-group-size``
    columns.
    """
    if not args.quantization_aware_training:
        return None
    stored = Quantizer.of_checkpoint(args.hf_checkpoint)
    return stored or Quantizer(Int4(args.int4_group_size), rules_of({"ignore": ONLY_EXPERTS}))


def round_weights(args: Args, models: Sequence[torch.nn.Module]) -> None:
    """Let the linear layers of ``models`` compute with rounded weights, where the flags ask for it.

    The parameters stay as they are: checkpoints and pushes have the exact ones. Raises ValueError for layouts that cut
    through what has one scale, and when nothing of the model is quantized.
    """
    quantizer = quantizer_in_training(args)
    if quantizer is None:
        return
    family, dims = model_family(args), model_dims(args, models[0].config)
    places = {id(p): (m, n) for model in models for m in model.modules() for n, p in m.named_parameters(recurse=False)}
    found: dict[torch.nn.Module, dict[str, Rounding]] = {}
    for name, weight in global_named_parameters(models):
        if weight.dim() != 2 or not family.knows(name):
            continue
        rule, _, _, hf_names = hf_place(name, family, args.num_layers)
        ranks = (expert_tensor_parallel() if rule.is_expert else tensor_parallel()) if rule.layout.sharded else Ranks()
        shapes = rule.layout.hf_shapes(tuple(weight.shape), ranks.size, dims)
        stacked = (dims.num_experts,) if rule.is_stacked else ()
        chosen = tuple(quantizer.selects(n, (*stacked, *shape)) for n, shape in zip(hf_names, shapes, strict=True))
        if any(chosen):
            rows = tuple(
                shape[0] if isinstance(rule.layout, RowParallel) else shape[0] // ranks.size for shape in shapes
            )
            rounding = Rounding(quantizer.format, rows, chosen, _order(rule, rows, dims))
            _check(name, weight, rule, rounding, ranks, dims)
            module, attribute = places[id(weight)]
            found.setdefault(module, {})[attribute] = rounding
    for module, roundings in found.items():
        compute_rounded(module, roundings)


def _order(rule: Rule, rows: tuple[int, ...], dims: Dims) -> torch.Tensor | None:
    if len(rows) == 1:
        return None
    numbered = torch.arange(sum(rows))
    order = rule.layout.shard(numbered.split(list(rows)), 0, 1, dims)
    return None if torch.equal(order, numbered) else order


def _check(name: str, weight: torch.Tensor, rule: Rule, rounding: Rounding, ranks: Ranks, dims: Dims) -> None:
    """Raise ValueError unless this rank's part of the weight can be rounded alone, and as a push does it."""
    if isinstance(rule.layout, Vocabulary):
        raise ValueError(
            f"--quantization-aware-training: {name} is quantized, which is available for linear layers only"
        )
    cut_rows = not isinstance(rule.layout, RowParallel)
    unit, lengths = (rounding.form.unit[0], rounding.rows) if cut_rows else (rounding.form.unit[1], weight.shape[1:])
    whole_groups = not isinstance(rule.layout, QueryKeyValue) or dims.num_query_groups % ranks.size == 0
    if ranks.size > 1 and (unit is None or any(length % unit for length in lengths) or not whole_groups):
        raise ValueError(
            f"--quantization-aware-training: on {ranks.size} tensor-parallel ranks {name} is cut into "
            f"{' and '.join(map(str, lengths))} {'rows' if cut_rows else 'columns'}, and {unit or 'all'} of them have "
            "one scale: use fewer ranks"
        )
    rounding.form.rounded(
        torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    )  # raises where it does not divide


def compute_rounded(module: torch.nn.Module, roundings: Mapping[str, Rounding]) -> None:
    """Let ``module`` see its parameters rounded while it computes.

    Its forward method is wrapped, and not preceded by a hook: Megatron's hooks, which wait for parameters that are
    being gathered, come before it whenever they are registered. Layers with a method ``expert``, which is given the
    number of an expert, compute one by one.
    """
    grouped = hasattr(module, "expert")
    method = "expert" if grouped else "forward"
    original: Callable[..., Any] = getattr(module, method)

    def rounded(*inputs: object, **options: object) -> Any:
        names = (f"weight{inputs[0]}",) if grouped else roundings
        try:
            for name in names:  # found before the parameter, which is not an attribute of the object itself
                module.__dict__[name] = StraightThrough.apply(module._parameters[name], roundings[name])
            return original(*inputs, **options)
        finally:
            for name in names:
                module.__dict__.pop(name, None)

    setattr(module, method, rounded)
