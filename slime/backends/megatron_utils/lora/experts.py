"""The low-rank adapters of routed experts: one per projection and expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from slime.backends.megatron_utils.lora.adapter import Adapter, Form, Kind, Projection, initial_a
from slime.backends.megatron_utils.state.parallel import Ranks, expert_parallel, expert_tensor_parallel

if TYPE_CHECKING:
    from slime.backends.megatron_utils.lora.adapter import Parts
    from slime.backends.megatron_utils.weights.maps import Rule


class ExpertAdapter(Adapter):
    """The adapters of a grouped linear layer: ``lora_A [experts, r, in]`` and ``lora_B [experts, out, r]``.

    Tokens are sent to all expert-tensor-parallel ranks of an expert before the layer, and their outputs are summed
    after it, so that no activations are exchanged here. What these ranks hold whole (A of the first layer, B of the
    second) has its gradient summed over them.
    """

    def __init__(
        self, form: Form, kind: Kind, rule: Rule, layer: int | None, *, inputs: int, count: int, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(form, kind, rule, layer, **parts)
        ranks = expert_tensor_parallel()
        first = expert_parallel().rank * count
        for name in self.targets:
            hf = rule.hf[list(self.rows).index(name)]
            cut = ranks if kind == "row" else Ranks()
            lora_a = [initial_a(form, f"{hf} {layer} {first + i}", inputs, cut) for i in range(count)]
            self.add_module(name, Projection(torch.stack(lora_a), self.rows[name]))
        self._mark(ranks)

    def _mark(self, ranks: Ranks) -> None:
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        for name in self.targets:
            a, b = self.projection(name).lora_A, self.projection(name).lora_B
            cut, whole = (b, a) if self.kind == "column" else (a, b)
            dim = 1 if self.kind == "column" else 2
            set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=dim, stride=1)
            if ranks.size == 1:  # no rank has a copy, so that every one counts for the norm of the gradient
                set_tensor_model_parallel_attributes(whole, is_parallel=True, dim=0, stride=1)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """Return what is added to the output of the local expert ``number`` for its tokens ``x [tokens, in]``."""
        parts = {}
        for name in self.targets:
            a, b = (parameter[number] for parameter in self.projection(name)())
            if self.kind == "column":
                a = _summed_gradient(a)
            else:
                b = _summed_gradient(b)
            dropped = F.dropout(x, self.form.dropout, self.training)
            parts[name] = F.linear(F.linear(dropped, a) * self.form.scale, b)
        return self.in_order(parts, x)

    def hook(self, linear: torch.nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> Any:
        """Forward hook of a grouped layer that is called with ``x [tokens, in]`` and the tokens of every expert."""
        del linear
        if not self.enabled:
            return None
        output, bias = outputs
        x, counts = inputs
        deltas = [self.expert(number, part) for number, part in enumerate(x.split(list(counts)))]
        return output + torch.cat(deltas), bias


def _summed_gradient(parameter: Tensor) -> Tensor:
    """Return the parameter, whose gradient is that of all expert-tensor-parallel ranks."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    ranks = expert_tensor_parallel()
    return parameter if ranks.size == 1 else copy_to_tensor_model_parallel_region(parameter, group=ranks.group)
