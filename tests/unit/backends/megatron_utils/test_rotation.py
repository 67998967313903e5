"""Rotary embedding of packed sequences equals megatron's own, and looks its angles up once."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import import_megatron

import_megatron()
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from slime.backends.megatron_utils.model import attention  # noqa: E402
from slime.backends.megatron_utils.patches import megatron_patches  # noqa: E402


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("every_token", [False, True])
@pytest.mark.parametrize("rotated", [8, 6])
def test_packed_rotation_and_its_gradient(cp_size: int, every_token: bool, rotated: int) -> None:
    ours = rope_utils._apply_rotary_pos_emb_thd
    plain = ours.__wrapped__
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, 12, 16, 32], dtype=torch.int32)
    freqs = torch.randn(32 if every_token else 16, 1, 1, rotated, generator=generator, dtype=torch.float64)
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_size - 1)
    wide = torch.randn(32 // cp_size, 3, 10, generator=generator, dtype=torch.float64)
    for mscale in (1.0, 0.5, 1.0):  # the angles of before are not taken for those of other settings
        found = []
        for function in (plain, ours):
            t = wide.clone().requires_grad_()
            out = function(t[..., 2:], cu_seqlens, freqs, mscale=mscale, cp_group=group)
            assert out.is_contiguous()
            weights = torch.arange(out.numel(), dtype=torch.float64).view_as(out)
            found.append((out, *torch.autograd.grad((out * weights).sum(), t)))
        for seen, wanted in zip(*found, strict=True):
            torch.testing.assert_close(seen, wanted)


def test_angles_are_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    of_a_packing = megatron_patches._packed_angles
    monkeypatch.setattr(
        megatron_patches, "_packed_angles", lambda *inputs: calls.append(inputs[1]) or of_a_packing(*inputs)
    )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    freqs = torch.randn(4, 1, 1, 8)
    for cu_seqlens in (torch.tensor([0, 4, 6]), torch.tensor([0, 2, 6])):
        for _ in range(4):
            rope_utils._apply_rotary_pos_emb_thd(torch.randn(6, 2, 8), cu_seqlens, freqs, cp_group=group)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="cp_group"):
        rope_utils._apply_rotary_pos_emb_thd(torch.randn(6, 2, 8), cu_seqlens, freqs, rotary_interleaved=True)


def test_in_bf16_it_is_no_less_exact() -> None:
    ours, plain = rope_utils._apply_rotary_pos_emb_thd, inspect.unwrap(rope_utils._apply_rotary_pos_emb_thd)
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(16, 3, 10, generator=generator).bfloat16()
    freqs = torch.randn(12, 1, 1, 6, generator=generator)
    cu_seqlens, group = torch.tensor([0, 12, 16]), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    exact = plain(t.double(), cu_seqlens, freqs.double(), cp_group=group)
    errors = [(rotate(t, cu_seqlens, freqs, cp_group=group).double() - exact).norm() for rotate in (ours, plain)]
    assert errors[0] <= 1.05 * errors[1]


def test_lengths_of_a_micro_batch_are_copied_to_the_device_once() -> None:
    attention._cumulative.cache_clear()
    first = attention._cumulative((3, 5), torch.device("cpu"))
    assert first.tolist() == [0, 3, 8]
    assert attention._cumulative((3, 5), torch.device("cpu")) is first
    assert attention._cumulative((5, 3), torch.device("cpu")).tolist() == [0, 5, 8]
