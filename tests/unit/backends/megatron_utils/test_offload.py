"""Sleeping frees every storage and waking up restores every byte in place."""

from __future__ import annotations

import copy

import pytest
import torch

from slime.backends.megatron_utils.state.offload import Offloader


class Chained:
    """The part of Megatron's ChainedOptimizer that is read."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.chained_optimizers = [self]


def trained() -> tuple[torch.nn.Module, Chained]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    model[2].weight = torch.nn.Parameter(torch.randn(6, 7)[:3])  # a view of a larger storage
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return model, Chained(optimizer)


def test_onload_restores_parameters_buffers_and_moments() -> None:
    model, optimizer = trained()
    before = copy.deepcopy((model.state_dict(), optimizer.optimizer.state_dict()))
    pointers = [id(p) for p in model.parameters()]
    offloader = Offloader([model], optimizer)

    freed = offloader.offload()
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    tensors += [v for s in optimizer.optimizer.state.values() for v in s.values() if v.dim()]
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    parameters = (5 * 7 + 7) + (7 + 7) + (6 * 7 + 3)  # the larger storage counts whole
    gradients_and_moments = 3 * ((5 * 7 + 7) + (7 + 7) + (3 * 7 + 3))
    batch_norm = 2 * 7 * 4 + 8
    assert freed == 4 * (parameters + gradients_and_moments) + batch_norm

    offloader.onload()
    assert [id(p) for p in model.parameters()] == pointers
    after = (model.state_dict(), optimizer.optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


def test_training_continues_as_if_nothing_had_happened() -> None:
    slept, slept_optimizer = trained()
    awake, awake_optimizer = trained()
    offloader = Offloader([slept], slept_optimizer)
    offloader.offload()
    offloader.onload()
    batch = torch.randn(4, 5)
    for model, optimizer in ((slept, slept_optimizer), (awake, awake_optimizer)):
        optimizer.optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.optimizer.step()
    for a, b in zip(slept.parameters(), awake.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_can_be_read_while_offloaded() -> None:
    model, optimizer = trained()
    weights = [p.detach().clone() for p in model.parameters()]
    offloader = Offloader([model], optimizer)
    offloader.offload()
    with offloader.weights_present():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
        moments = [v for s in optimizer.optimizer.state.values() for v in s.values() if v.dim()]
        assert all(m.untyped_storage().nbytes() == 0 for m in moments)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    offloader.onload()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    with offloader.weights_present():  # awake: nothing to do, nothing is freed at the end
        pass
    assert all(p.untyped_storage().nbytes() > 0 for p in model.parameters())


def test_state_on_another_device_is_left_alone() -> None:
    """As ``--optimizer-cpu-offload`` keeps it in host memory: a copy would double it."""
    model, optimizer = trained()
    all_of_it = Offloader([model], optimizer).offload()
    model, optimizer = trained()
    elsewhere = [state["exp_avg"] for state in optimizer.optimizer.state.values()]
    for state in optimizer.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to("meta")
        state["master_param"] = torch.empty(100, device="meta")
    offloader = Offloader([model], optimizer)
    assert offloader.offload() == all_of_it - sum(moment.nbytes for moment in elsewhere)
    assert all(state["master_param"].untyped_storage().nbytes() for state in optimizer.optimizer.state.values())
    offloader.onload()


def test_order_of_calls_is_checked() -> None:
    offloader = Offloader([torch.nn.Linear(1, 1)], None)
    with pytest.raises(RuntimeError, match="not offloaded"):
        offloader.onload()
    offloader.offload()
    with pytest.raises(RuntimeError, match="already offloaded"):
        offloader.offload()


def stepped_on_a_device() -> tuple[torch.nn.Linear, Chained]:
    model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = Chained(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.optimizer.step()
    return model, optimizer


@pytest.mark.gpu
def test_the_device_has_its_memory_back_while_the_trainer_sleeps() -> None:
    stepped_on_a_device()  # cuBLAS keeps the workspaces that it takes
    before = torch.cuda.memory_allocated()
    model, optimizer = stepped_on_a_device()
    weights = model.weight.detach().cpu()
    awake = torch.cuda.memory_allocated()
    four_matrices = 4 * 1024 * 1024 * 4  # weights, gradients and two moments
    assert awake - before >= four_matrices
    offloader = Offloader([model], optimizer)
    assert offloader.offload() >= four_matrices
    assert torch.cuda.memory_allocated() - before <= (1 << 20)
    with offloader.weights_present():
        assert torch.equal(model.weight.cpu(), weights)
    assert torch.cuda.memory_allocated() - before <= (1 << 20)
    offloader.onload()
    assert torch.cuda.memory_allocated() == awake
    assert torch.equal(model.weight.cpu(), weights)
