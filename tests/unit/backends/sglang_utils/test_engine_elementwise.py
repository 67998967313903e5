"""Norm, rotary embedding and decoder layers of CPU engines are those of SGLang, which this file repeats."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_plugin import engine_plugin

HEAD = 16


class RotaryEmbedding:
    """The part of SGLang's class that the hook uses."""

    is_neox_style = True
    rotary_dim = head_size = HEAD

    def __init__(self, base: float = 100.0) -> None:
        frequencies = base ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.arange(500)[:, None] * frequencies
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def forward_native(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        rotated = []
        for x in (query, key):
            first, second = x.view(len(positions), -1, HEAD).chunk(2, dim=-1)
            halves = first * cos - second * sin, second * cos + first * sin
            rotated.append(torch.cat(halves, dim=-1).view(x.shape))
        return rotated


@pytest.fixture
def elementwise() -> Iterator[ModuleType]:
    with engine_plugin({"layers.rotary_embedding.base": {"RotaryEmbedding": RotaryEmbedding}}) as load:
        yield load("cpu.elementwise")


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("SGLang's own was called")


def norm_layer(**fields: Any) -> SimpleNamespace:
    plain = {"variance_size_override": None, "override_orig_dtype": None, "fp32_residual": False}
    weight = torch.rand(32)
    return SimpleNamespace(hidden_size=32, weight=weight, variance_epsilon=1e-5, **{**plain, **fields})


@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 32)])
def test_norm(elementwise, shape: tuple[int, ...]) -> None:
    layer, x, residual = norm_layer(), torch.randn(shape), torch.randn(shape)

    def expected(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        return (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * layer.weight).float()

    assert (elementwise.norm(never, layer, x) - expected(x)).abs().max() < 1e-6
    normed, added = elementwise.norm(never, layer, x, residual)
    assert torch.equal(added, x + residual)
    assert (normed - expected(x + residual)).abs().max() < 1e-6


def test_other_norms_stay_with_sglang(elementwise) -> None:
    x = torch.randn(2, 32)
    for layer in (norm_layer(variance_size_override=8), norm_layer(override_orig_dtype=torch.float32)):
        assert elementwise.norm(lambda *args: "sglang", layer, x) == "sglang"
    layer = norm_layer()
    assert elementwise.norm(lambda *args: "sglang", layer, x.bfloat16()) == "sglang"
    assert elementwise.norm(lambda *args: "sglang", layer, x, x.bfloat16()) == "sglang"
    assert elementwise.norm(lambda *args: "sglang", layer, x, None, x) == "sglang"
    assert elementwise.norm(lambda *args: "sglang", layer, torch.randn(2, 16)) == "sglang"


def test_rotary_embedding_of_many_passes(elementwise) -> None:
    """The table of a pass is kept for its layers, and for no other positions or embedding."""
    embeddings = RotaryEmbedding(), RotaryEmbedding(7.0)
    positions = torch.randint(0, 490, (9,))  # of 500, and they grow
    for step in range(6):
        for _layer in range(2):
            query, key = torch.randn(9, 4 * HEAD), torch.randn(9, 2 * HEAD)
            embedding = embeddings[step // 3]
            found = elementwise.rotate(never, embedding, positions, query, key)
            for mine, theirs in zip(found, embedding.forward_native(positions, query, key), strict=True):
                assert mine.shape == theirs.shape
                assert (mine - theirs).abs().max() < 2e-6
        positions += 1  # in place: SGLang may keep the tensor


def test_parts_of_larger_tensors_are_rotated(elementwise) -> None:
    joint, positions = torch.randn(5, 8 * HEAD), torch.arange(5)
    query, key, _ = joint.split((4 * HEAD, 2 * HEAD, 2 * HEAD), dim=-1)
    expected = RotaryEmbedding().forward_native(positions, query.contiguous(), key.contiguous())
    for mine, theirs in zip(elementwise.rotate(never, RotaryEmbedding(), positions, query, key), expected, strict=True):
        assert (mine - theirs).abs().max() < 2e-6


@pytest.mark.parametrize("field", [{"is_neox_style": False}, {"rotary_dim": HEAD // 2}])
def test_other_embeddings_stay_with_sglang(elementwise, field: dict[str, Any]) -> None:
    class Other(RotaryEmbedding):
        def forward_native(self, *args: Any) -> Any:
            raise NotImplementedError

    query, positions = torch.randn(3, HEAD), torch.arange(3)
    embedding = RotaryEmbedding()
    vars(embedding).update(field)
    for other in (embedding, Other()):
        assert elementwise.rotate(lambda *args: "sglang", other, positions, query, query) == "sglang"
    asked = (positions, query, query, torch.ones(3))
    assert elementwise.rotate(lambda *args: "sglang", RotaryEmbedding(), *asked) == "sglang"


Q_HEADS, K_HEADS, HIDDEN, FFN, TOKENS = 4, 2, 32, 48, 5


class Layer:
    """A decoder layer whose attention adds up what it gets, in float64."""

    def __init__(self, decoder: ModuleType, *, bias: bool) -> None:
        def parameters(*shape: int, bias: bool = False) -> SimpleNamespace:
            return SimpleNamespace(weight=torch.randn(shape) / 4, bias=torch.randn(shape[0]) if bias else None)

        def norm(size: int) -> SimpleNamespace:
            return SimpleNamespace(weight=torch.rand(size) + 0.5, variance_epsilon=1e-5)

        heads = Q_HEADS + K_HEADS
        self.parts = decoder.Parts(
            input_norm=norm(HIDDEN), qkv=parameters((heads + K_HEADS) * HEAD, HIDDEN, bias=bias), q_norm=norm(HEAD),
            k_norm=norm(HEAD), rotary=RotaryEmbedding(), attention=self.attend,
            out=parameters(HIDDEN, Q_HEADS * HEAD, bias=bias), mlp_norm=norm(HIDDEN),
            gate_up=parameters(2 * FFN, HIDDEN), down=parameters(HIDDEN, FFN), q_heads=Q_HEADS, heads=heads,
            head_dim=HEAD,
        )  # fmt: skip
        decoder._PARTS[self] = self.parts

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        assert forward_batch == "batch"
        return q + k.repeat(1, Q_HEADS // K_HEADS) - 2 * v.repeat(1, Q_HEADS // K_HEADS)

    def expected(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer as its equations say it; x: hidden states and residual, added up."""
        parts = self.parts

        def norm(x: torch.Tensor, norm: SimpleNamespace) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * norm.weight.double()

        def linear(x: torch.Tensor, layer: SimpleNamespace) -> torch.Tensor:
            return x @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())

        qkv = linear(norm(x, parts.input_norm), parts.qkv).view(TOKENS, -1, HEAD)
        q, k, v = qkv.split([Q_HEADS, K_HEADS, K_HEADS], dim=1)
        q, k = parts.rotary.forward_native(positions, norm(q, parts.q_norm), norm(k, parts.k_norm))
        x = x + linear(self.attend(q.flatten(1), k.flatten(1), v.flatten(1), "batch"), parts.out)
        gate, up = linear(norm(x, parts.mlp_norm), parts.gate_up).chunk(2, dim=-1)
        return linear(gate * torch.sigmoid(gate) * up, parts.down), x


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("bias", [False, True])
def test_decoder_layer(bias: bool) -> None:
    decoder = importlib.import_module("slime_engine_plugin.cpu.decoder")
    layer, positions = Layer(decoder, bias=bias), torch.tensor([0, 7, 7, 450, 3])
    hidden, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    given = hidden.clone(), residual.clone()
    for first in (True, False):
        found = decoder.forward(never, layer, positions, hidden, "batch", None if first else residual)
        whole = hidden.double() if first else hidden.double() + residual
        for ours, right in zip(found, layer.expected(positions, whole), strict=True):
            assert (ours - right).abs().max() < 2e-5
    assert torch.equal(hidden, given[0])
    assert torch.equal(residual, given[1])


@pytest.mark.usefixtures("elementwise")
def test_other_decoder_layers_stay_with_sglang() -> None:
    decoder = importlib.import_module("slime_engine_plugin.cpu.decoder")
    layer, positions = Layer(decoder, bias=False), torch.arange(TOKENS)
    hidden = torch.randn(TOKENS, HIDDEN)
    for asked in (
        (positions, hidden.to(torch.bfloat16), "batch", None, None),
        (positions, hidden, "batch", None, hidden),  # something to add behind the residual
        (positions.expand(3, -1), hidden, "batch", None, None),  # multimodal positions
        (positions, hidden[:0], "batch", None, None),
    ):
        assert decoder.forward(lambda *args: args, layer, *asked) == (layer, *asked)
    decoder._PARTS[layer] = None  # quantized, of several ranks, with adapters
    asked = (positions, hidden, "batch", None, None)
    assert decoder.forward(lambda *args: args, layer, *asked) == (layer, *asked)
