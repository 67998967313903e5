"""The low-rank adapters of one Megatron linear layer: y + alpha / r * B(A x) (Hu et al. 2021, arXiv:2106.09685).

Megatron fuses projections (q, k and v; gate and up); adapters are one per projection of the Hugging Face model, which
is what PEFT and SGLang name and load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from slime.backends.megatron_utils.state.parallel import Ranks, tensor_parallel, unwrap
from slime.backends.megatron_utils.weights.merging import ADAPTER

if TYPE_CHECKING:
    from slime.backends.megatron_utils.weights.maps import Rule

    class Parts(TypedDict):
        """Keyword arguments of ``Adapter``."""

        rows: Mapping[str, int]
        targets: Sequence[str]
        order: Tensor | None


Kind = Literal["column", "row", "replicated"]


@dataclass(frozen=True)
class Form:
    """Settings of the adapters: the flags ``--lora-*``."""

    rank: int
    alpha: float
    dropout: float
    seed: int
    sequence_parallel: bool

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / self.rank


class Projection(torch.nn.Module):
    """``lora_A [r, in]`` and ``lora_B [out, r]`` of one projection, this rank's part of them; B is zero.

    Those of routed experts have a first dimension more: the local experts.
    """

    def __init__(self, lora_a: Tensor, rows: int) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(lora_a)
        self.lora_B = torch.nn.Parameter(torch.zeros(*lora_a.shape[:-2], rows, lora_a.shape[-2]))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B. It is called while training: Megatron's hooks wait for parameters that are being gathered."""
        return self.lora_A, self.lora_B


class Adapter(torch.nn.Module):
    """The adapters of one linear layer whose weight has ``rule``.

    ``kind``: how tensor parallelism cuts the layer. ``rows``: rows of this rank's weight by projection, in the order of
    ``rule.hf``; ``targets`` of them are adapted. ``order [rows]``: where the layer's output has which of the
    projections' rows, one below the other; None: in order.
    """

    order: Tensor | None

    def __init__(
        self,
        form: Form,
        kind: Kind,
        rule: Rule,
        layer: int | None,
        *,
        rows: Mapping[str, int],
        targets: Sequence[str],
        order: Tensor | None,
    ) -> None:
        super().__init__()
        self.form, self.kind, self.rule, self.layer = form, kind, rule, layer
        self.rows, self.targets = dict(rows), list(targets)
        self.enabled = True
        self.register_buffer("order", order, persistent=False)

    def projection(self, name: str) -> Projection:
        """Return the adapter of the projection ``name``."""
        found = self.get_submodule(name)
        assert isinstance(found, Projection)
        return found

    def hook(self, linear: torch.nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> Any:
        """Forward hook of the layer: add what the adapters make of its inputs to its output."""
        raise NotImplementedError

    def in_order(self, by_name: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the projections' parts ``[..., rows]`` as the layer's output has them, zeros where there is none."""
        parts = [
            by_name[name] if name in by_name else like.new_zeros(*like.shape[:-1], rows)
            for name, rows in self.rows.items()
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return whole if self.order is None else whole.index_select(-1, self.order)

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int | None = None) -> Tensor:
        """Return ``weight + alpha / r * B A``, computed in fp32, in the dtype of ``weight`` (this rank's part).

        ``expert``: the local number of the routed expert whose weight it is.
        """
        products = {}
        for name in self.targets:
            pair = (self.projection(name).lora_A, self.projection(name).lora_B)
            a, b = (part.float() if expert is None else part[expert].float() for part in pair)
            products[name] = (b @ a).T
        delta = self.in_order(products, weight.detach().float().T).T
        return (weight.detach().float() + self.form.scale * delta).to(weight.dtype)


class LinearAdapter(Adapter):
    """The adapters of a column-parallel, row-parallel or replicated layer; ``hook`` adds them to the layer's output."""

    def __init__(
        self, form: Form, kind: Kind, rule: Rule, layer: int | None, *, inputs: int, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(form, kind, rule, layer, **parts)
        for name in self.targets:
            seed = f"{rule.hf[list(self.rows).index(name)]} {layer}"
            lora_a = initial_a(form, seed, inputs, tensor_parallel() if kind == "row" else Ranks())
            self.add_module(name, Projection(lora_a, self.rows[name]))
        self._mark()

    def _mark(self) -> None:
        """Say which parameters differ between tensor-parallel ranks, and whose gradients are to be summed over them.

        Under sequence parallelism a rank sees its own tokens only before the gather, and after the scatter.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        for name in self.targets:
            a, b = self.projection(name).lora_A, self.projection(name).lora_B
            if self.kind == "column":
                set_tensor_model_parallel_attributes(b, is_parallel=True, dim=0, stride=1)
            elif self.kind == "row":
                set_tensor_model_parallel_attributes(a, is_parallel=True, dim=1, stride=1)
            whole = {"column": (a,), "row": (b,), "replicated": (a, b)}[self.kind]
            for parameter in whole:
                setattr(parameter, "sequence_parallel", self.form.sequence_parallel)  # noqa: B010  (Megatron's mark)

    def hook(self, linear: torch.nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> Any:
        """Forward hook of the layer: its output is (``[s, b, rows]``, bias)."""
        if not self.enabled:
            return None
        output, bias = outputs
        return output + self(_normalized(linear, inputs[0])), bias

    def forward(self, x: Tensor) -> Tensor:
        """Return ``alpha / r * B(A x)`` for ``x [s, b, in]``, laid out like the layer's output."""
        pairs = {name: self.projection(name)() for name in self.targets}
        z = F.linear(self._dropped(x), torch.cat([a for a, _ in pairs.values()]))
        z = self._exchanged(z) * self.form.scale
        parts = zip(pairs.items(), z.split(self.form.rank, dim=-1), strict=True)
        return self.in_order({name: F.linear(part, b) for (name, (_, b)), part in parts}, z)

    def _exchanged(self, z: Tensor) -> Tensor:
        """Make ``z = A x`` that of all tokens (column-parallel) or of the whole input (row-parallel)."""
        from megatron.core.tensor_parallel import mappings

        if tensor_parallel().size == 1 or self.kind == "replicated":
            return z
        if self.kind == "column":
            if self.form.sequence_parallel:
                return mappings.gather_from_sequence_parallel_region(z, tensor_parallel_output_grad=True)
            return mappings.copy_to_tensor_model_parallel_region(z)
        if self.form.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(z)
        return mappings.reduce_from_tensor_model_parallel_region(z)

    def _dropped(self, x: Tensor) -> Tensor:
        if self.form.dropout == 0.0 or not self.training:
            return x
        if tensor_parallel().size > 1 and (self.kind == "row" or self.form.sequence_parallel):
            from megatron.core.tensor_parallel import get_cuda_rng_tracker

            with get_cuda_rng_tracker().fork():  # the ranks hold other numbers, and drop others
                return F.dropout(x, self.form.dropout)
        return F.dropout(x, self.form.dropout)


def initial_a(form: Form, name: str, inputs: int, ranks: Ranks) -> Tensor:
    """Return ``[r, inputs]``, as ``torch.nn.Linear`` is initialized (PEFT's default): uniform, up to 1 / sqrt(in).

    The same numbers under every layout: drawn for the whole projection, from its name, and cut over ``ranks``.
    """
    whole = inputs * ranks.size
    digest = hashlib.sha256(f"{form.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = whole**-0.5
    full = torch.empty(form.rank, whole).uniform_(-bound, bound, generator=generator)
    return full.chunk(ranks.size, dim=1)[ranks.rank].contiguous()


def _normalized(linear: Any, x: Tensor) -> Tensor:
    """Return what the weight is multiplied with: TransformerEngine fuses the norm before a layer into some layers."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    weight = weight + 1 if linear.zero_centered_gamma else weight
    if linear.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, linear.eps)
    bias = linear.layer_norm_bias
    return F.layer_norm(x, x.shape[-1:], weight, bias, linear.eps)


def adapters_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Adapter]]:
    """Yield the linear layers of a model chunk that have adapters, by their name in the chunk, and these."""
    for name, module in unwrap(chunk).named_modules():
        adapter = getattr(module, ADAPTER, None)
        if isinstance(adapter, Adapter):
            yield name, module, adapter


@contextmanager
def adapters_off(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the body the chunks compute what the base model computes."""
    adapters = [adapter for chunk in model for _, _, adapter in adapters_of(chunk)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
