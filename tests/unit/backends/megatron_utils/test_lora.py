"""Adapters of TransformerEngine's layers, dropout, and initial values: parts that no CPU run exercises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.lora.adapter import Form, LinearAdapter, _normalized
from slime.backends.megatron_utils.lora.experts import ExpertAdapter
from slime.backends.megatron_utils.weights.layouts import ColumnParallel
from slime.backends.megatron_utils.weights.maps import Rule

RULE = Rule(
    ("decoder.layers.{layer}.mlp.linear.weight",), ("model.layers.{layer}.mlp.up_proj.weight",), ColumnParallel()
)
EXPERTS = Rule(
    ("decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",),
    ("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",),
    ColumnParallel(),
)


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    import_megatron()


def form(**values: Any) -> Form:
    return Form(**{"rank": 4, "alpha": 8.0, "dropout": 0.0, "seed": 0, "sequence_parallel": False, **values})


def adapter(**values: Any) -> LinearAdapter:
    parts = {"rows": {"up_proj": 6}, "targets": ["up_proj"], "order": None}
    made = LinearAdapter(form(**values), "column", RULE, 3, inputs=64, **parts)
    torch.nn.init.normal_(made.projection("up_proj").lora_B)
    return made


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_layer_with_its_norm_inside_is_given_what_is_normalized(normalization: str, zero_centered: bool) -> None:
    x, weight, bias = torch.randn(5, 1, 64), torch.randn(64), torch.randn(64)
    linear = SimpleNamespace(
        layer_norm_weight=weight, layer_norm_bias=bias, zero_centered_gamma=zero_centered,
        normalization=normalization, eps=1e-3,
    )  # fmt: skip
    scale = weight + 1 if zero_centered else weight
    if normalization == "RMSNorm":
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    else:
        centered = x - x.mean(-1, keepdim=True)
        expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale + bias
    torch.testing.assert_close(_normalized(linear, x), expected)
    assert _normalized(SimpleNamespace(), x) is x


def test_a_grouped_layer_has_the_adapter_of_every_expert() -> None:
    parts = {"rows": {"up_proj": 6}, "targets": ["up_proj"], "order": None}
    made = ExpertAdapter(form(), "column", EXPERTS, 0, inputs=64, count=3, **parts)
    own = made.projection("up_proj")
    torch.nn.init.normal_(own.lora_B)
    x, output, counts = torch.randn(7, 64), torch.randn(7, 6), [2, 0, 5]
    seen, bias = made.hook(torch.nn.Identity(), (x, counts), (output, None))
    assert bias is None
    owners = [0, 0, 2, 2, 2, 2, 2]
    expected = torch.stack([output[i] + 2.0 * own.lora_B[e] @ own.lora_A[e] @ x[i] for i, e in enumerate(owners)])
    torch.testing.assert_close(seen, expected)
    assert not torch.equal(own.lora_A[0], own.lora_A[1])
    made.enabled = False
    assert made.hook(torch.nn.Identity(), (x, counts), (output, None)) is None


def test_dropout_is_of_training_and_keeps_the_mean() -> None:
    x = torch.ones(1, 1, 64)
    made, plain = adapter(dropout=0.5), adapter()
    plain.load_state_dict(made.state_dict())
    made.eval()
    assert torch.equal(made(x), plain(x))
    made.train()
    torch.manual_seed(0)
    mean = torch.stack([made(x) for _ in range(4000)]).mean(0)
    assert not torch.equal(made(x), plain(x))
    torch.testing.assert_close(mean, plain(x), rtol=0, atol=0.1)


def test_first_numbers_are_those_of_a_linear_layer() -> None:
    parts: dict[str, Any] = {"rows": {"up_proj": 6}, "targets": ["up_proj"], "order": None}
    made = LinearAdapter(form(rank=64), "column", RULE, 3, inputs=400, **parts)
    a = made.projection("up_proj").lora_A.detach()
    assert a.abs().max() <= 1 / 20  # kaiming_uniform_(a=sqrt(5)): 1 / sqrt(in)
    assert a.std() == pytest.approx(1 / 20 / 3**0.5, rel=0.02)
    assert torch.equal(made(torch.randn(2, 1, 400)), torch.zeros(2, 1, 6))
    other = LinearAdapter(form(rank=64), "column", RULE, 4, inputs=400, **parts)
    assert not torch.equal(a, other.projection("up_proj").lora_A)
