"""The gated delta rule in chunks against the recurrence token by token, in fp64."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from slime.backends.megatron_utils.model.delta_rule import (
    by_kernel,
    causal_convolution,
    chunks_of,
    gated_delta_rule,
    kernel_for,
    unit_length,
)

LENGTHS = [[1], [64], [65, 3], [130, 0, 64, 200, 1], [2] * 9]
KEYS, SHARED, DK, DV = 2, 3, 4, 5


def recurrence(q, k, v, g, beta, lengths):
    """As the module's docstring has it: one token after the other, each head alone."""
    q, k = (
        q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * DK**-0.5,
        k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    )
    rows, start = [], 0
    for length in lengths:
        state = torch.zeros(KEYS, SHARED, DK, DV, dtype=torch.float64)
        for t in range(start, start + length):
            state = state * g[t].exp()[..., None, None]
            read = torch.einsum("nrde,nd->nre", state, k[t])
            state = state + torch.einsum("nd,nre->nrde", k[t], beta[t][..., None] * (v[t] - read))
            rows.append(torch.einsum("nrde,nd->nre", state, q[t]))
        start += length
    return torch.stack(rows)


def drawn(lengths):
    total = sum(lengths)
    q, k = (torch.randn(total, KEYS, DK, dtype=torch.float64) for _ in range(2))
    v = torch.randn(total, KEYS, SHARED, DV, dtype=torch.float64)
    g = -torch.rand(total, KEYS, SHARED, dtype=torch.float64)
    beta = torch.rand(total, KEYS, SHARED, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_outputs_and_gradients_are_those_of_the_recurrence(lengths) -> None:
    inputs = drawn(lengths)
    out, expected = gated_delta_rule(*inputs, lengths), recurrence(*inputs, lengths)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for mine, theirs in zip(found, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_strong_decay_has_no_infinite_numbers() -> None:
    q, k, v, g, beta = drawn([150])
    out = gated_delta_rule(q, k, v, g * 1e4, beta, [150])
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, g, beta))
    torch.testing.assert_close(out, recurrence(q, k, v, g * 1e4, beta, [150]))


def test_no_token_is_lost_and_steps_hold_the_longest_first() -> None:
    chunks = chunks_of((3, 0, 9, 4), torch.device("cpu"), size=4)
    assert chunks.steps == [3, 1, 1]
    assert chunks.tokens[0].tolist() == [3, 4, 5, 6]
    assert chunks.empty.tolist() == [
        [False] * 4, [False] * 4, [False] * 3 + [True], [False] * 4, [False] + [True] * 3,
    ]  # fmt: skip
    assert chunks.tokens.flatten()[chunks.places].tolist() == list(range(16))


def test_nothing_is_computed_of_nothing() -> None:
    empty = [x[:0] for x in drawn([2])]
    assert gated_delta_rule(*empty, []).shape == gated_delta_rule(*empty, [0]).shape == (0, KEYS, SHARED, DV)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_convolution_is_that_of_torch_along_each_sequence(lengths) -> None:
    x = torch.randn(sum(lengths), 6, dtype=torch.float64)
    conv = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=False, dtype=torch.float64)
    parts = [conv(part.t()[None])[0, :, : len(part)].t() for part in x.split(lengths) if len(part)]
    torch.testing.assert_close(causal_convolution(x, conv.weight, lengths), torch.cat(parts))


def test_a_kernel_gets_one_batch_with_the_ends_of_the_sequences() -> None:
    """As fla 0.6 and flash-qla 0.1.3 take it: a head for every value head, decays in fp32."""
    lengths, seen = [3, 0, 5], {}
    q, k, v, g, beta = (x.detach().bfloat16() for x in drawn(lengths))

    def kernel(**arguments):
        seen.update(arguments)
        return arguments["v"] * 2, None

    out = by_kernel(kernel, q, k, v, g, beta, lengths)
    assert torch.equal(out, v * 2)
    assert seen.pop("cu_seqlens").tolist() == [0, 3, 8]
    assert seen.pop("use_qk_l2norm_in_kernel") is True
    assert {name: tuple(x.shape) for name, x in seen.items()} == {
        **dict.fromkeys("qk", (1, 8, 6, DK)), "v": (1, 8, 6, DV), **dict.fromkeys(["g", "beta"], (1, 8, 6)),
    }  # fmt: skip
    assert torch.equal(seen["q"][0, :, 2], q[:, 0])
    assert seen["g"].dtype == torch.float32


def test_torch_computes_where_there_is_no_kernel(monkeypatch, caplog) -> None:
    """Off CUDA whatever the flag says; on CUDA where fla, the default, is not installed, but not another package."""
    assert kernel_for("flashqla", "cpu") is None
    kernel_for.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kernel_for("fla", "cuda") is None
    assert "flash-linear-attention" in caplog.text
    with pytest.raises(ModuleNotFoundError, match="pip install flash-qla"):
        kernel_for("flashqla", "cuda")
    kernel_for.cache_clear()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_qla", package := ModuleType("flash_qla"))
    package.__spec__ = ModuleSpec("flash_qla", None)
    package.chunk_gated_delta_rule = len
    assert kernel_for("flashqla", "cuda") is len
    kernel_for.cache_clear()


def test_unit_length() -> None:
    assert unit_length(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
