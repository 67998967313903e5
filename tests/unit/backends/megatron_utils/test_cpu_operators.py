from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.patches import cpu_adapter
from slime.backends.megatron_utils.patches.cpu_adapter import among_several, swiglu, swiglu_back
from tests.support.marks import needs_no_cuda


@pytest.mark.parametrize("shape", [(6,), (5, 8), (5, 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    g = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator, dtype=torch.float64).to(dtype)
    exact = y.double().clone().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    expected.backward(g.double())
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    for seen, wanted in ((swiglu(y), expected.detach()), (swiglu_back(g, y), exact.grad)):
        assert seen.dtype == dtype
        assert seen.is_contiguous()
        torch.testing.assert_close(seen.double(), wanted, rtol=tolerance, atol=tolerance)


@needs_no_cuda
def test_megatron_uses_them() -> None:
    import_megatron()
    from megatron.core.fusions import fused_bias_swiglu

    assert fused_bias_swiglu.swiglu is cpu_adapter.swiglu
    assert fused_bias_swiglu.swiglu_back is cpu_adapter.swiglu_back
    y = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)

    def plain(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    cases: list[tuple[Any, Any, list[torch.Tensor]]] = [
        (fused_bias_swiglu.bias_swiglu_impl(y, None), plain(y), [y]),
        (fused_bias_swiglu.bias_swiglu_impl(y, bias), plain(y + bias), [y, bias]),
        (fused_bias_swiglu.weighted_bias_swiglu_impl(y, None, weights), plain(y) * weights, [y, weights]),
    ]
    for fused, expected, inputs in cases:
        torch.testing.assert_close(fused, expected)
        grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (fused, expected))
        for seen, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(seen, wanted.reshape(seen.shape))


@needs_no_cuda
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("trains_input", [False, True])
def test_linear_layers_multiply_with_onednn(
    with_bias: bool, trains_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_megatron()
    from megatron.core.tensor_parallel import layers

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 2, 48, generator=generator, requires_grad=trains_input)
    weight = torch.randn(24, 40, generator=generator, requires_grad=True)
    bias = torch.randn(24, generator=generator, requires_grad=True) if with_bias else None
    upstream = torch.randn(5, 2, 24, generator=generator)
    counted, calls = cpu_adapter._product, list[int]()
    monkeypatch.setattr(cpu_adapter, "_product", lambda *inputs: calls.append(1) or counted(*inputs))
    flags = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    out = linear(input=wide[..., 4:44], weight=weight, bias=bias, **flags, grad_output_buffer=None, tp_group=object())
    trained = [x for x in (wide, weight, bias) if x is not None and x.requires_grad]
    seen = torch.autograd.grad(out, trained, upstream)
    assert len(calls) == (2 if trains_input else 1)
    exact = {id(x): x.detach().double().requires_grad_() for x in (wide, weight, bias) if x is not None}
    expected = exact[id(wide)][..., 4:44] @ exact[id(weight)].t()
    expected = expected if bias is None else expected + exact[id(bias)]
    wanted = torch.autograd.grad(expected, [exact[id(x)] for x in trained], upstream.double())
    for ours, theirs in zip((out, *seen), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        {"gradient_accumulation_fusion": True},
        {"allreduce_dgrad": True},
        {"sequence_parallel": True},
        {"grad_output_buffer": []},
        {"dtype": torch.float64},
        {"rows": 0},
    ],
)
def test_other_linear_layers_are_left_to_megatron(flags: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []

    def plain(input: torch.Tensor, weight: torch.Tensor, bias: None, **options: Any) -> str:
        seen.append(options)
        return "plain"

    flags = dict(flags)
    dtype, rows = flags.pop("dtype", torch.float32), flags.pop("rows", 3)
    linear = cpu_adapter.multiplying_with_onednn(plain)
    x, weight = torch.ones(rows, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype)
    assert linear(x, weight, None, **flags) == "plain"
    assert seen == [flags]


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_of_one_needs_no_collective(size: int) -> None:
    calls: list[dict[str, Any]] = []

    def collective(output: torch.Tensor, input_: torch.Tensor, **options: Any) -> str:
        calls.append(options)
        return "handle"

    group = SimpleNamespace(size=lambda: size)
    source = torch.arange(4.0)
    output = torch.zeros(4)
    result = among_several(collective)(output, source, group=group, async_op=True)
    if size == 1:
        assert (result, calls) == (None, [])
        assert torch.equal(output, source)
        assert among_several(collective)(source, source, group=group, async_op=False) is None
    else:
        assert (result, calls) == ("handle", [{"group": group, "async_op": True}])
