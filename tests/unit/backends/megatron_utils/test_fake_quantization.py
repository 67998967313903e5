"""Rounded weights on one layer: which rows share a scale, whose gradient it is, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from slime.backends.megatron_utils.model.fake_quantization import Rounding, _check, _order, compute_rounded
from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.weights.layouts import Dims, GateUp, Layout, QueryKeyValue, RowParallel
from slime.weights.quantization import Format, Fp8, Int4

DIMS = Dims(num_attention_heads=4, num_query_groups=2, kv_channels=8, vocab_size=16, padded_vocab_size=16)
BLOCKS, INT4 = Fp8((8, 16), "block"), Int4(16)


def rounding_of(
    form: Format, layout: Layout, rows: tuple[int, ...], chosen: tuple[bool, ...] | None = None
) -> Rounding:
    rule = SimpleNamespace(layout=layout)
    return Rounding(form, rows, chosen or (True,) * len(rows), _order(rule, rows, DIMS))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [BLOCKS, INT4])
@pytest.mark.parametrize("size", [1, 2])
def test_projections_that_megatron_fuses_are_rounded_one_by_one(form: Format, size: int) -> None:
    """q, k and v lie by group in one weight, and blocks of FP8 are blocks of q, k or v."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(rows, 32, generator=generator) * scale for rows, scale in ((32, 1.0), (16, 9.0), (16, 0.1))]
    layout = QueryKeyValue()
    rounding = rounding_of(form, layout, (32 // size, 16 // size, 16 // size))
    of_files = [form.rounded(weight) for weight in qkv]
    for rank in range(size):
        exact, expected = (layout.shard(whole, rank, size, DIMS) for whole in (qkv, of_files))
        assert torch.equal(rounding(exact), expected)
        assert not torch.equal(exact, expected)


def test_what_the_files_do_not_quantize_stays_exact() -> None:
    weight = torch.randn(16, 32)
    rounded = rounding_of(INT4, GateUp(), (8, 8), (False, True))(weight)
    assert torch.equal(rounded[:8], weight[:8])
    assert torch.equal(rounded[8:], INT4.rounded(weight[8:]))


def test_the_gradient_of_the_rounded_weight_goes_to_the_exact_one() -> None:
    linear = torch.nn.Linear(32, 8)
    exact = linear.weight.detach().clone()
    x = torch.randn(3, 32, requires_grad=True)
    compute_rounded(linear, {"weight": rounding_of(INT4, RowParallel(), (8,))})
    output = linear(x)
    output.square().sum().backward()

    leaf = INT4.rounded(exact).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    expected = F.linear(twin, leaf, linear.bias.detach())
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(linear.weight.grad, leaf.grad)  # type: ignore[arg-type]
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]
    assert isinstance(linear.weight, torch.nn.Parameter)
    assert torch.equal(linear.weight, exact)


def test_a_layer_that_fails_gets_its_parameter_back() -> None:
    linear = torch.nn.Linear(32, 8)
    compute_rounded(linear, {"weight": rounding_of(INT4, RowParallel(), (8,))})
    with pytest.raises(RuntimeError):
        linear(torch.randn(3, 31))
    assert isinstance(linear.weight, torch.nn.Parameter)


def test_training_with_rounded_weights_makes_better_rounded_weights() -> None:
    """Of inputs that lie in four of 32 directions: errors of rounding can be made to cancel there."""
    losses = {}
    for rounds in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inputs, layer = torch.randn(64, 4) @ torch.randn(4, 32) / 4, torch.nn.Linear(32, 8, bias=False)
            answers = inputs @ torch.randn(32, 8)
        if rounds:
            compute_rounded(layer, {"weight": rounding_of(INT4, RowParallel(), (8,))})
        adam = torch.optim.Adam(layer.parameters(), lr=2e-2)
        for _ in range(200):
            adam.zero_grad()
            F.mse_loss(layer(inputs), answers).backward()
            adam.step()
        losses[rounds] = F.mse_loss(F.linear(inputs, INT4.rounded(layer.weight.detach())), answers).item()
    assert losses[True] < losses[False] / 2


@pytest.mark.parametrize(
    ("form", "layout", "shape", "rows", "message"),
    [
        (INT4, RowParallel(), (8, 24), (8,), "into 24 columns, and 16 of them have one scale: use fewer ranks"),
        (BLOCKS, GateUp(), (24, 32), (12, 12), "into 12 and 12 rows, and 8 of them have one scale"),
        (Fp8(), GateUp(), (16, 32), (8, 8), "8 and 8 rows, and all of them have one scale"),
    ],
)
def test_ranks_that_cut_through_a_scale_are_refused(
    form: Format, layout: Layout, shape: tuple[int, int], rows: tuple[int, ...], message: str
) -> None:
    rule, weight = SimpleNamespace(layout=layout), torch.empty(shape)
    with pytest.raises(ValueError, match=message):
        _check(
            "decoder.layers.0.mlp.linear_fc1.weight", weight, rule, rounding_of(form, layout, rows), Ranks(0, 2), DIMS
        )  # type: ignore[arg-type]
