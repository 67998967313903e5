"""Every bit of a quantized weight is that of a slow version, written element by element with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.weights.quantization import Fp8, Int4
from slime.weights.quantization.formats import FP8

f32 = np.float32
E4M3 = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127]
"""The numbers of e4m3 that are not negative, by their bits."""


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return numbers of many sizes, with a row of zeros, and blocks of one sign."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    made[0] = 0
    made[1] = made[1].abs() + 0.01
    made[-1, -1] = 7.5
    return made.to(dtype)


def slow_fp8(values: np.ndarray, largest: f32, least: float, ue8m0: bool) -> tuple[np.ndarray, f32]:
    scale = f32(max(largest, f32(least))) / f32(448)
    if ue8m0:
        mantissa, exponent = math.frexp(scale)
        scale = f32(math.ldexp(1, exponent - (mantissa == 0.5)))
    return np.array([e4m3(v / scale) for v in values.flat], np.uint8).reshape(values.shape), scale


def e4m3(value: f32) -> int:
    """Return the bits of the nearest number, of the two that are as near the even one."""
    bits = min(range(127), key=lambda bits: (abs(E4M3[bits] - abs(float(value))), bits % 2))
    return bits + 128 * bool(np.signbit(value))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 24), (13, 19), (3, 40)])
def test_blocks_in_fp8(shape: tuple[int, int], dtype: torch.dtype, ue8m0: bool) -> None:
    given, (rows, columns) = weight(*shape, dtype), (8, 6)
    made = Fp8((rows, columns), "block", ue8m0).quantize(given)
    values = given.float().numpy()
    numbers, scales = made[""].view(torch.uint8).numpy(), made["_scale_inv"].numpy()
    assert list(made) == ["", "_scale_inv"]
    assert made[""].dtype == FP8
    assert scales.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    assert scales.dtype == f32
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            expected, scale = slow_fp8(values[at], max(abs(v) for v in values[at].flat), 1e-10, ue8m0)
            assert scales[i, j] == scale
            assert np.array_equal(numbers[at], expected)


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_rows_and_tensors_in_fp8(per: str) -> None:
    given = weight(5, 12)
    made = Fp8(per=per).quantize(given)  # type: ignore[arg-type]
    values, numbers = given.float().numpy(), made[""].view(torch.uint8).numpy()
    parts = [np.s_[i : i + 1] for i in range(5)] if per == "channel" else [np.s_[:]]
    assert tuple(made["_scale"].shape) == ((5, 1) if per == "channel" else (1,))
    for part, scale in zip(parts, made["_scale"].flatten().tolist(), strict=True):
        expected, wanted = slow_fp8(values[part], max(abs(v) for v in values[part].flat), 1e-12, False)
        assert scale == wanted
        assert np.array_equal(numbers[part], expected)


def slow_int4(values: np.ndarray, symmetric: bool, dtype: torch.dtype) -> tuple[list[int], float, int]:
    """Return the sixteen-valued numbers of one group, its scale in ``dtype``, and its zero point."""
    low, high = min(0, *values), max(0, *values)
    scale = f32(max(high, -low)) / f32(7) if symmetric else f32(f32(high) - f32(low)) / f32(15)
    stored = torch.tensor(max(scale, f32(1e-5))).to(dtype).item()
    zero = 8 if symmetric else int(min(max(-np.rint(f32(low) / f32(stored)), 0), 15))
    least = 1 if symmetric else 0
    return [int(min(max(np.rint(f32(v) / f32(stored)) + zero, least), 15)) for v in values], stored, zero


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [8, 16])
def test_groups_in_int4(group: int, dtype: torch.dtype, symmetric: bool) -> None:
    given = weight(16, 32, dtype)
    made = Int4(group, symmetric).quantize(given)
    values = given.float().numpy()
    assert list(made) == [*(() if symmetric else ("_zero_point",)), "_packed", "_scale", "_shape"]
    assert made["_shape"].tolist() == [16, 32]
    assert tuple(made["_packed"].shape) == (16, 4)
    assert made["_scale"].dtype == dtype
    zeros = np.zeros((16, 32 // group), int)
    for row in range(16):
        numbers = []
        for g in range(32 // group):
            part, scale, zeros[row, g] = slow_int4(values[row, g * group : (g + 1) * group], symmetric, dtype)
            numbers += part
            assert made["_scale"][row, g].item() == scale
        for word in range(4):
            expected = sum(number << (4 * i) for i, number in enumerate(numbers[word * 8 : word * 8 + 8]))
            assert made["_packed"][row, word].item() & 0xFFFFFFFF == expected
    if not symmetric:
        for eight in range(2):
            for g in range(32 // group):
                expected = sum(int(zeros[eight * 8 + i, g]) << (4 * i) for i in range(8))
                assert made["_zero_point"][eight, g].item() & 0xFFFFFFFF == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_what_compressed_tensors_unpacks(symmetric: bool) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    given, form = weight(16, 64), Int4(32, symmetric)
    made = form.quantize(given)
    numbers = helpers.unpack_from_int32(made["_packed"], 4, torch.Size([16, 64])).float()
    zeros: torch.Tensor | float = 0.0
    if not symmetric:
        zeros = helpers.unpack_from_int32(made["_zero_point"], 4, torch.Size([16, 2]), packed_dim=0).float()
        zeros = zeros.repeat_interleave(32, 1)
    expected = ((numbers - zeros) * made["_scale"].float().repeat_interleave(32, 1)).bfloat16()
    assert torch.equal(form.dequantize(made), expected)
    assert (expected.float() - given.float()).abs().max() <= made["_scale"].float().max() * 0.6


@pytest.mark.parametrize("form", [Fp8((8, 6), "block"), Fp8(per="channel"), Fp8(), Int4(8), Int4(8, False)])
def test_numbers_round_trip_and_meta_tensors_give_the_shapes(form: Fp8 | Int4) -> None:
    given = weight(16, 24, torch.float32)
    made = form.quantize(given)
    again = form.dequantize(made)
    assert again.dtype == torch.bfloat16
    assert (again.float() - given).abs().max() <= (0.04 if isinstance(form, Fp8) else 0.08) * 7.5
    meta = form.quantize(torch.empty(16, 24, device="meta"))
    assert {n: (t.shape, t.dtype) for n, t in meta.items()} == {n: (t.shape, t.dtype) for n, t in made.items()}


@pytest.mark.parametrize("form", [Fp8((8, 6), "block"), Fp8(per="channel"), Fp8(), Int4(8), Int4(8, False)])
def test_rounded_weights_are_numbers_times_scales(form: Fp8 | Int4) -> None:
    given = weight(16, 24)
    assert torch.equal(form.rounded(given), form.dequantize(form.quantize(given)))
    assert form.rounded(given.float()).dtype == torch.float32


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_rounded_to_what_the_checkpoint_stores(symmetric: bool) -> None:
    """A trainer in fp32 sends engines numbers of the scale that they have in bf16."""
    given = weight(16, 32)
    exact = Int4(8, symmetric, scale_dtype=torch.bfloat16).quantize(given.float())
    for name, part in Int4(8, symmetric).quantize(given).items():
        assert exact[name].dtype == part.dtype
        assert torch.equal(exact[name], part)


def test_scales_of_ue8m0_are_those_of_sglang() -> None:
    scales = torch.rand(1000) * 10 ** torch.linspace(-8, 3, 1000)
    made = Fp8(ue8m0=True)._scale(scales * 448, 1e-12)
    bits = (scales * 448 / 448).view(torch.int32)
    exponent = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0)
    assert torch.equal(made, (exponent << 23).view(torch.float32))


def test_int4_says_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"\(4, 24\) cannot be stored in INT4: .* group size 16"):
        Int4(16).quantize(torch.zeros(4, 24))
    with pytest.raises(ValueError, match="its rows a multiple of 8"):
        Int4(8, False).quantize(torch.zeros(4, 24))
