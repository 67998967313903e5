"""Layers that an engine rearranges after loading, without an engine: what a push finds, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_plugin import engine_plugin


@pytest.fixture
def repacked() -> Iterator[ModuleType]:
    with engine_plugin() as load:
        yield load("weights.repacked")


class Loaded(torch.nn.Parameter):
    """A parameter that knows how it is loaded, as SGLang's."""


class Method:
    """Rearranges as Marlin does: new parameters of another shape, a workspace, and marks on the old ones."""

    def __init__(self, repacked: ModuleType, in_place: bool) -> None:
        self.repacked, self.in_place = repacked, in_place

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.repacked.process(Method.rearrange, self, layer)

    def rearrange(self, layer: Any) -> None:
        for name in ("packed", "scale"):
            parameter = layer._parameters[name]
            rearranged = parameter.data.t().contiguous().view(2, -1)
            parameter.loader = None
            if self.in_place:
                parameter.resize_(rearranged.shape)
                parameter.copy_(rearranged)
            else:
                layer.register_parameter(name, torch.nn.Parameter(rearranged, requires_grad=False))
        layer.order = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.workspace = torch.zeros(3)


def made(repacked: ModuleType, in_place: bool) -> tuple[torch.nn.Module, Method]:
    layer = torch.nn.Module()
    for name, dtype in (("packed", torch.int32), ("scale", torch.bfloat16)):
        parameter = Loaded(torch.zeros(4, 6).to(dtype), requires_grad=False)
        parameter.loader = name  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)
    return layer, Method(repacked, in_place)


def load(layer: Any, numbers: torch.Tensor, *names: str) -> None:
    """Load as a model does: by the parameter's own function, into its shape."""
    for name in names:
        assert layer._parameters[name].loader == name
        assert layer._parameters[name].shape == (4, 6)
        layer._parameters[name].data.copy_(numbers)


def push(repacked: ModuleType, layer: torch.nn.Module, numbers: torch.Tensor, *names: str) -> Any:
    """A push in two parts, of which the second one has the version."""
    runner = SimpleNamespace(get_model=lambda: layer)
    for name, version in zip(names, (*[None] * (len(names) - 1), "2"), strict=True):

        def of_runner(updater: Any, name: str = name) -> Any:
            load(layer, numbers, name)
            return SimpleNamespace(success=True, message="")

        def of_manager(manager: Any, request: Any) -> Any:
            return repacked.prepare_before(of_runner, runner)

        reply = repacked.finish_after(of_manager, None, SimpleNamespace(weight_version=version))
    return reply


@pytest.mark.parametrize("in_place", [False, True])
def test_a_push_leaves_what_a_load_does_at_the_same_addresses(repacked: ModuleType, in_place: bool) -> None:
    first, second = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6) * 3 + 1
    layer, method = made(repacked, in_place)
    load(layer, first, "packed", "scale")
    method.process_weights_after_loading(layer)
    before = dict(layer.named_parameters())
    addresses = {name: p.data_ptr() for name, p in before.items()}
    workspace = method.workspace.data_ptr()

    for numbers in (second, first, second):
        reply = push(repacked, layer, numbers, "packed", "scale")
        assert reply.success
        after = dict(layer.named_parameters())
        assert {name: p.data_ptr() for name, p in after.items()} == addresses
        assert all(after[name] is before[name] for name in before)
        assert method.workspace.data_ptr() == workspace
        for name in ("packed", "scale"):
            expected = numbers.to(after[name].dtype).t().contiguous().view(2, -1)
            assert torch.equal(after[name], expected), name


def test_a_push_without_all_scales_fails_and_the_next_one_heals_it(repacked: ModuleType) -> None:
    numbers = torch.ones(4, 6)
    layer, method = made(repacked, False)
    load(layer, numbers, "packed", "scale")
    method.process_weights_after_loading(layer)
    reply = push(repacked, layer, numbers, "packed")
    assert not reply.success
    assert "a push left out scale (4, 6) of Module" in reply.message
    assert push(repacked, layer, numbers, "packed", "scale").success


def test_a_failed_part_is_not_rearranged(repacked: ModuleType) -> None:
    layer, method = made(repacked, False)
    load(layer, torch.ones(4, 6), "packed", "scale")
    method.process_weights_after_loading(layer)
    repacked.prepare(layer)
    failed = SimpleNamespace(success=False, message="no")
    reply = repacked.finish_after(lambda manager, request: failed, None, SimpleNamespace(weight_version="2"))
    assert reply is failed
    assert layer.get_parameter("packed").shape == (4, 6)


def test_layers_in_blocks_stay_as_they_were_loaded(repacked: ModuleType) -> None:
    layer, method = made(repacked, False)
    method.block_quant = True  # type: ignore[attr-defined]
    parameters = dict(layer.named_parameters())
    repacked.process(lambda method, layer: None, method, layer)
    repacked.prepare(layer)
    assert all(layer.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert not torch.isnan(layer.get_parameter("scale")).any()
