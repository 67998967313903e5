from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import import_megatron

import_megatron()

from slime.backends.megatron_utils.model.layer_specs import TorchRMSNorm, rms_norm  # noqa: E402  needs the adapted megatron


def _config(**overrides: Any) -> SimpleNamespace:
    values = {
        "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "use_cpu_initialization": True,
        "params_dtype": torch.float32, "sequence_parallel": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **overrides})


@pytest.mark.parametrize("zero_centered", [False, True])
def test_formula(zero_centered: bool) -> None:
    norm = TorchRMSNorm(_config(layernorm_zero_centered_gamma=zero_centered), 6, eps=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 6, generator=generator)
    start = norm.weight.detach().clone()
    assert torch.equal(start, torch.zeros(6) if zero_centered else torch.ones(6))
    with torch.no_grad():
        norm.weight.add_(torch.randn(6, generator=generator))
    factor = norm.weight.detach().double() + (1 if zero_centered else 0)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * factor
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("part", [slice(None), slice(4, 12)])  # all of a tensor, or a part of it as keys are of QKV
def test_gradients_on_a_cpu_are_those_of_the_formula(part: slice, trained: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 2, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    size = len(range(16)[part])
    weight = torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=trained)
    upstream = torch.randn(5, 2, 1, generator=generator, dtype=torch.float64).expand(5, 2, size)
    inputs = [whole, weight] if trained else [whole]
    x = whole[..., part]
    plain = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    seen, expected = (torch.autograd.grad(y, inputs, upstream) for y in (rms_norm(x, weight, 0.1), plain))
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_is_marked_for_the_gradient_sum_over_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    assert TorchRMSNorm(_config(sequence_parallel=sequence_parallel), 4).weight.sequence_parallel is sequence_parallel


def test_dtype_is_kept() -> None:
    norm = TorchRMSNorm(_config(params_dtype=torch.bfloat16), 4)
    assert norm.weight.dtype is torch.bfloat16
    assert norm(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_weights_around_zero_keep_their_digits_in_bf16() -> None:
    norm = TorchRMSNorm(_config(params_dtype=torch.bfloat16, layernorm_zero_centered_gamma=True), 64, eps=1e-6)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=generator) * 0.1)
    x = torch.randn(100, 64, generator=generator).bfloat16()
    in_fp32 = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight.float())
    assert (norm(x) != in_fp32.bfloat16()).float().mean() < 0.01  # 0.3 with 1 + weight in bf16


def test_layer_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="--normalization LayerNorm needs TransformerEngine"):
        TorchRMSNorm(_config(normalization="LayerNorm"), 4)
