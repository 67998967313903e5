"""Plans of models: every element of every parameter, once, or a refusal that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from slime.weights.p2p.plan import RefusedError, trace
from tests.support.loaders import DENSE, KINDS, Dense, contents, described, random_weights


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_does_what_loading_does(kind: str, ranks: int, dtype: torch.dtype) -> None:
    make, shapes = KINDS[kind]
    weights = random_weights(shapes, torch.float32)
    for rank in range(ranks):
        loaded, written = make(rank, ranks, dtype), make(rank, ranks, dtype)
        loaded.load_weights(weights.items())
        pieces = trace(written, described(weights))
        assert not any(t.any() for t in contents(written).values())
        tensors = list(weights.values())
        memory = {name: t.data for name, t in (*written.named_parameters(), *written.named_buffers())}
        for piece in pieces:
            packed = piece.pack(tensors[piece.tensor], dtype).view(dtype)
            memory[piece.parameter].as_strided(piece.shape, piece.target, piece.target_start).copy_(
                packed.reshape(piece.shape)
            )
        expected, found = contents(loaded), contents(written)
        assert set(expected) == set(found)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_shards_of_two_ranks_are_as_large_as_what_they_hold() -> None:
    weights = random_weights(DENSE, torch.float32)
    for rank, rows in ((0, 11), (1, 10)):
        pieces = trace(Dense(rank, 2, torch.float32), described(weights))
        sizes = dict.fromkeys(DENSE, 0)
        for piece in pieces:
            sizes[list(DENSE)[piece.tensor]] += piece.numel
        assert sizes["embed.weight"] == rows * 12
        assert sizes["attn.q_proj.weight"] == 8 * 12
        assert sizes["attn.k_proj.weight"] == 4 * 12
        assert {piece.parameter for piece in pieces} == {"embed", "norm", "qkv", "o", "gate_up", "down"}


def loading(function: Callable[[Any, str, torch.Tensor], None]) -> type[Dense]:
    """A dense model that loads its norm by ``function``."""

    class Other(Dense):
        def load(self, name: str, loaded: torch.Tensor) -> None:
            if name == "norm.weight":
                function(self, name, loaded)
            else:
                super().load(name, loaded)

    return Other


def computed_after(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data.copy_(loaded)
    model.derived = model.norm.data + 1


def computed_in_place(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data.copy_(loaded)
    model.norm.data.mul_(2)


def twice(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data.copy_(loaded)
    model.norm.data[3:5].copy_(loaded[:2])


def half(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data[::2].copy_(loaded[::2])


def by_value(model: Any, name: str, loaded: torch.Tensor) -> None:
    for i in range(len(loaded)):
        model.norm.data[i] = loaded[i].item()


def replacing(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm = nn.Parameter(loaded, requires_grad=False)


def keeping(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data.copy_(loaded)
    model.kept = loaded


def in_a_thread(model: Any, name: str, loaded: torch.Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.norm.data.copy_, loaded).result()


def as_integers(model: Any, name: str, loaded: torch.Tensor) -> None:
    model.norm.data.view(torch.int32).copy_(loaded)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, n, w: m.norm.data.copy_(w + 1), "norm is loaded with what is computed"),
        (lambda m, n, w: m.norm.data.copy_(torch.cat([w[:6], w[6:]])), "norm is loaded with what is computed"),
        (lambda m, n, w: m.norm.data.copy_(w.add_(1)), r"computed with before they are loaded \(aten.add_"),
        (lambda m, n, w: m.norm.data.copy_(w.to(torch.float64)), "norm is loaded with what is computed"),
        (computed_after, r"norm is read or computed when weights are loaded \(aten.add"),
        (computed_in_place, r"norm is read or computed when weights are loaded \(aten.mul_"),
        (twice, "norm has elements that are loaded twice"),
        (half, "norm has elements that none of the trainer's tensors is loaded into"),
        (lambda m, n, w: None, "norm has elements that none of the trainer's tensors is loaded into"),
        (by_value, "Other looks into what it loads"),
        (replacing, "norm is replaced when weights are loaded"),
        (keeping, "kept is replaced when weights are loaded"),
        (in_a_thread, "Other looks into what it loads"),
        (as_integers, r"norm \(torch.float32\) is loaded as torch.int32"),
    ],
)  # fmt: skip
def test_what_is_more_than_copying_is_refused_and_changes_nothing(function: Any, said: str) -> None:
    model = loading(function)(0, 2, torch.float32)
    weights = random_weights(DENSE, torch.float32)
    model.load_weights([item for item in weights.items() if item[0] != "norm.weight"])
    before, parameter = contents(model), model.norm
    with pytest.raises(RefusedError, match=said):
        trace(model, described(weights))
    after = contents(model)
    assert model.norm is parameter
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert getattr(model, "kept", None) is None


def test_a_tensor_that_the_trainer_does_not_have_is_missed() -> None:
    weights = random_weights(DENSE, torch.float32)
    del weights["attn.k_proj.weight"]
    with pytest.raises(RefusedError, match="qkv has elements that none of the trainer's tensors is loaded into"):
        trace(Dense(1, 2, torch.float32), described(weights))
