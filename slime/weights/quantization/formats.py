"""Formats of one quantized weight: FP8 with a scale per block, row or tensor, and INT4 with a scale per group of a row.

Beside them MXFP4 as gpt-oss is published, which is only read.

``quantize`` returns the tensors that take the place of the weight ``NAME``, by what follows ``NAME`` in their names.
Everything is computed in fp32 and rounded once, half to even; it works on meta tensors, which give the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
Parts = dict[str, torch.Tensor]


class Stored(Protocol):
    """Format that one weight can be read in."""

    @property
    def marker(self) -> str:
        """Return what follows the name of a weight in the name of a tensor that only a quantized weight has."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return what follows the name of a weight in the names of its tensors, in the order of ``quantize``."""
        ...

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight of ``parts`` in bf16."""
        ...


class Format(Stored, Protocol):
    """Format that one weight is stored in."""

    def quantize(self, weight: torch.Tensor) -> Parts:
        """Return the tensors that take the place of ``weight``. Raises ValueError for one that does not divide."""
        ...

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what engines multiply by, numbers times scales, in the dtype of ``weight``. Raises as ``quantize``."""
        ...

    @property
    def unit(self) -> tuple[int | None, int | None]:
        """Return how many rows and columns share one scale; None: all of them."""
        ...

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Return ``quantization_config`` of a checkpoint of which the modules ``ignored`` are not quantized."""
        ...


@dataclass(frozen=True)
class Fp8:
    """e4m3 with a scale per ``block`` (rows, columns), else per row or tensor; ``ue8m0``: scales are powers of two."""

    block: tuple[int, int] | None = None
    per: Literal["block", "channel", "tensor"] = "tensor"
    ue8m0: bool = False

    @property
    def marker(self) -> str:
        return "_scale_inv" if self.block else "_scale"

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("", self.marker)

    @property
    def unit(self) -> tuple[int | None, int | None]:
        return self.block or ((1, None) if self.per == "channel" else (None, None))

    def quantize(self, weight: torch.Tensor) -> Parts:
        numbers, scale, _ = self._quantized(weight)
        return {"": numbers, self.marker: scale}

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        numbers, _, spread = self._quantized(weight)
        return (numbers.float() * spread).to(weight.dtype)

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers, the scales, and the scales in a shape that multiplies the numbers."""
        whole = weight.float()
        if self.block:
            scale = self._scale(_blocks(whole, self.block).abs().amax(dim=(-3, -1)), 1e-10)
            spread = _spread(scale, self.block, whole.shape)
        elif self.per == "channel":
            scale = spread = self._scale(whole.abs().amax(dim=-1, keepdim=True), 1e-12)
        else:
            scale = spread = self._scale(whole.abs().amax().reshape(1), 1e-12)
        return (whole / spread).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale, spread

    def _scale(self, largest: torch.Tensor, least: float) -> torch.Tensor:
        scale = largest.clamp(min=least) / FP8_MAX
        if self.ue8m0:  # up to the next power of two: a mantissa that is not 0 carries into the exponent
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        return scale

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = parts[""].float(), parts[self.marker].float()
        if scale.numel() > 1 and self.per != "channel":
            scale = _spread(scale, self.block or (1, 1), weight.shape)
        return (weight * scale).to(torch.bfloat16)

    def config(self, ignored: list[str]) -> dict[str, Any]:
        if self.per == "channel":
            weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
            inputs = {**weights, "strategy": "token", "dynamic": True}
            return _compressed_tensors("float-quantized", weights, inputs, ignored)
        found: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if self.block:
            found["weight_block_size"] = list(self.block)
        if self.ue8m0:
            found["scale_fmt"] = "ue8m0"
        return {**found, "modules_to_not_convert": ignored}


@dataclass(frozen=True)
class Int4:
    """compressed-tensors' ``pack-quantized``: 8 numbers to an int32, a scale (and zero point) per group of columns.

    Numbers are those of the scale as it is stored, which an engine multiplies by: in ``scale_dtype``, or that of the
    weight.
    """

    group_size: int
    symmetric: bool = True
    scale_dtype: torch.dtype | None = None

    marker = "_packed"

    @property
    def suffixes(self) -> tuple[str, ...]:
        own = ("_packed", "_scale", "_shape")
        return own if self.symmetric else ("_zero_point", *own)

    @property
    def unit(self) -> tuple[int | None, int | None]:
        return 1, self.group_size

    def quantize(self, weight: torch.Tensor) -> Parts:
        numbers, scale, zeros = self._quantized(weight)
        parts = {} if self.symmetric else {"_zero_point": _pack(zeros.transpose(-1, -2)).transpose(-1, -2).contiguous()}
        shape = torch.tensor(weight.shape[-2:], dtype=torch.int32, device=weight.device)
        return {**parts, "_packed": _pack(numbers.flatten(-2)), "_scale": scale, "_shape": shape}

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        numbers, scale, zeros = self._quantized(weight)
        return ((numbers - zeros.unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2).to(weight.dtype)

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers 0 to 15 by row and group, and the scales and zero points of the groups."""
        *_, rows, columns = weight.shape
        if columns % self.group_size or columns % 8 or (rows % 8 and not self.symmetric):
            raise ValueError(
                f"a weight {tuple(weight.shape)} cannot be stored in INT4: its columns must be a multiple of 8 and of "
                f"the group size {self.group_size}, and where there are zero points its rows a multiple of 8"
            )
        groups, stored = weight.float().unflatten(-1, (-1, self.group_size)), self.scale_dtype or weight.dtype
        if self.symmetric:
            scale = (groups.abs().amax(-1) / 7).clamp(min=1e-5).to(stored)
            numbers = (groups / scale.float().unsqueeze(-1)).round().clamp(-7, 7) + 8
            return numbers, scale, torch.full_like(scale, 8, dtype=torch.float32)
        # 0 is inside of the range, or a group of one sign would have a zero point that is none of the 16.
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-5).to(stored)
        zeros = (-(low / scale.float()).round()).clamp(0, 15)
        numbers = ((groups / scale.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
        return numbers, scale, zeros

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        numbers, scale = _unpack(parts["_packed"]), parts["_scale"].float()
        columns = int(parts["_shape"][-1])
        groups = numbers[..., :columns].unflatten(-1, (scale.shape[-1], -1))
        zeros: Any = 8
        if not self.symmetric:
            zeros = _unpack(parts["_zero_point"].transpose(-1, -2)).transpose(-1, -2)[..., : scale.shape[-2], :, None]
        return ((groups - zeros) * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)

    def config(self, ignored: list[str]) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "int", "symmetric": self.symmetric, "strategy": "group",
                   "group_size": self.group_size, "dynamic": False, "observer": "minmax"}  # fmt: skip
        return _compressed_tensors("pack-quantized", weights, None, ignored)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4 bits without a sign (OCP Microscaling Formats 1.0, 5.3.3); the highest bit is the sign."""


class Mxfp4:
    """Stacked experts of gpt-oss: ``_blocks [experts, out, groups, 16]`` of two numbers a byte, the lower bits first.

    ``_scales [experts, out, groups]`` are exponents of 2, plus 127. The weight is ``[experts, in, out]``.
    """

    marker = "_blocks"
    suffixes = ("_blocks", "_scales")

    def dequantize(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight in bf16, which is exact."""
        blocks = parts["_blocks"]
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
        halves = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1)
        weight = torch.ldexp(halves.flatten(-2), parts["_scales"].int().unsqueeze(-1) - 127).flatten(-2)
        return weight.to(torch.bfloat16).transpose(-1, -2).contiguous()


def _compressed_tensors(
    name: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignored: list[str]
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None,
    }  # fmt: skip


def _blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return ``weight`` [..., m, n] as [..., blocks, rows, blocks, columns], with zeros around what does not fill."""
    (m, n), (rows, columns) = weight.shape[-2:], block
    padded = torch.nn.functional.pad(weight, (0, -n % columns, 0, -m % rows))
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Return the scale of every element of a weight of ``shape``. Raises ValueError where they do not fit."""
    expected = tuple(-(-size // length) for size, length in zip(shape[-2:], block, strict=True))
    if tuple(scale.shape[-2:]) != expected:
        raise ValueError(
            f"a weight {tuple(shape)} in blocks of {tuple(block)} needs scales {expected}, got {tuple(scale.shape)}"
        )
    for dimension, length in ((-2, block[0]), (-1, block[1])):
        scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, shape[dimension])
    return scale


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers 0 to 15 as int32: element i of eight in bits 4 i to 4 i + 3."""
    eights = numbers.to(torch.int32).unflatten(-1, (-1, 8))
    packed = eights[..., 0].clone()
    for i in range(1, 8):
        packed |= eights[..., i] << (4 * i)
    return packed


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)
