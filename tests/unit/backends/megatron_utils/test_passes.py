"""Columns that the passes make are the passes'."""

from __future__ import annotations

import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.logprob_passes import (
    drop_precomputed_logprobs,
    forget_last_tokens,
    may_round_logits,
)
from tests.support.arguments import run_args


def test_log_probs_that_came_with_the_samples_are_not_the_old_policy(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"rollout_log_probs": [torch.zeros(2)], "teacher_log_probs": [torch.zeros(2)], "rewards": [1.0]}
    data = {**columns, "log_probs": [torch.zeros(2)], "ref_entropy": [torch.zeros(2)]}
    drop_precomputed_logprobs(data)
    assert data == columns
    assert "left out of the train data: log_probs, ref_entropy" in caplog.text
    caplog.clear()
    drop_precomputed_logprobs(data)
    assert not caplog.records
    drop_precomputed_logprobs(data, teacher=True)  # which computes the column again
    assert "teacher_log_probs" not in data
    assert "left out of the train data: teacher_log_probs" in caplog.text


class Routed(torch.nn.Module):
    """A layer whose dispatcher keeps the probabilities of its last tokens, as Megatron's and DeepEP's do."""

    def __init__(self, *, deepep: bool) -> None:
        super().__init__()
        self.router = torch.nn.Linear(4, 2)
        self.deepep = deepep
        self.token_dispatcher = SimpleNamespace(sort_input_by_local_experts=torch.arange(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probs = self.router(hidden).softmax(-1)
        kept = {"routing_map": probs > 0.5, "tokens_per_expert": None}
        if self.deepep:
            self.token_dispatcher._comm_manager = SimpleNamespace(token_probs=probs, **kept)
        else:
            vars(self.token_dispatcher).update(probs=probs, **kept)
        return hidden * probs.amax(-1, keepdim=True)


@pytest.mark.parametrize("deepep", [False, True])
def test_layers_with_experts_do_not_keep_their_input(deepep: bool) -> None:
    layer = Routed(deepep=deepep)
    hidden = torch.randn(3, 4)
    leaf = hidden.detach().requires_grad_()  # as recomputation makes one of the layer's input
    layer(leaf).sum().backward()
    gone = weakref.ref(leaf)
    del leaf
    assert gone() is not None
    forget_last_tokens([torch.nn.Sequential(torch.nn.Linear(1, 1), layer)])
    assert gone() is None
    assert torch.equal(layer.token_dispatcher.sort_input_by_local_experts, torch.arange(2))
    layer(hidden)  # the next micro-batch finds all that it needs


def test_logits_stay_in_16_bits_for_losses_that_take_chunks_of_them() -> None:
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    def shell(kind: type, inside: torch.nn.Module) -> Any:
        found = kind.__new__(kind)
        torch.nn.Module.__init__(found)
        found.module = inside
        return found

    assert "fp32_output" in inspect.signature(Float16Module.forward).parameters
    exact = torch.nn.Linear(1, 1)
    half = shell(Float16Module, exact)
    for chunk in (half, shell(DistributedDataParallel, half)):
        assert may_round_logits(run_args(), chunk)
        assert may_round_logits(run_args(loss_type="sft_loss"), chunk)
        assert not may_round_logits(run_args(loss_type="custom_loss"), chunk)
        assert not may_round_logits(run_args(rollout_top_p=0.9), chunk)
    for chunk in (exact, shell(DistributedDataParallel, exact), torch.nn.Sequential(half)):
        assert not may_round_logits(run_args(), chunk)  # these do not know the argument
