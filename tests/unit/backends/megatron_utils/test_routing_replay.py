"""The stages of routing replay, on routers of plain torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.routing_replay import STAGE_VARIABLE, RoutingReplay
from tests.support.arguments import run_args

EXPERTS, TOPK = 6, 2


class Router(torch.nn.Module):
    """Scores tokens [n, 4] and asks ``router_replay`` for the top-k, as Megatron's does."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.weight = torch.nn.Parameter(torch.randn(4, EXPERTS))
        self.router_replay: Any = None
        self.seen: list[list[list[int]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, indices = self.router_replay.get_replay_topk(
            x @ self.weight, TOPK, None, None, lambda s, k, num_groups=None, group_topk=None: torch.topk(s, k, dim=1)
        )
        self.seen.append(indices.tolist())
        return torch.softmax(scores, dim=-1) * (1 + indices)


class Recomputed(torch.autograd.Function):
    """Keeps nothing of the forward but its input, and runs it again in the backward, as Megatron's checkpoints do."""

    @staticmethod
    def forward(ctx: Any, router: Router, x: torch.Tensor) -> torch.Tensor:
        ctx.router = router
        ctx.save_for_backward(x)
        return router(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.router(x).backward(grad)
        return None, x.grad


def batch_of(positions: list[int], length: int = 5, **columns: Any) -> dict[str, Any]:
    tokens = torch.zeros(1, length * len(positions), dtype=torch.long)
    return {"sample_positions": positions, "tokens": tokens, "total_lengths": [length] * len(positions), **columns}


def new_replay(routers: list[Router], **flags: Any) -> RoutingReplay:
    engines = flags.pop("from_engines", False)
    return RoutingReplay(run_args(use_routing_replay=True, num_experts=EXPERTS), routers, from_engines=engines)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv(STAGE_VARIABLE, "to be restored")


def test_training_repeats_what_the_log_prob_pass_chose_in_forward_and_recomputation() -> None:
    routers = [Router(1), Router(2)]
    replay = new_replay(routers)
    batches = {(0,): torch.randn(5, 4), (2, 1): torch.randn(10, 4)}
    assert os.environ[STAGE_VARIABLE] == "fallthrough"
    with replay.old_policy(), torch.no_grad():
        for positions, x in batches.items():
            with replay.forward(batch_of(list(positions))):
                assert os.environ[STAGE_VARIABLE] == "record"
                for router in routers:
                    router(x)
    recorded = [list(router.seen) for router in routers]
    for router in routers:
        router.seen.clear()
        torch.nn.init.normal_(router.weight)

    with replay.training():
        outputs = []
        for positions, x in batches.items():  # both forwards first, as in a pipeline
            with replay.forward(batch_of(list(positions))):
                assert os.environ[STAGE_VARIABLE] == "replay_forward"
                kept = routers[0](x.requires_grad_())
                outputs.append(kept.sum() + Recomputed.apply(routers[1], x).sum())
        assert os.environ[STAGE_VARIABLE] == "replay_backward"
        for output in outputs:
            output.backward()
    assert os.environ[STAGE_VARIABLE] == "fallthrough"
    assert routers[0].seen == recorded[0]
    assert routers[1].seen == recorded[1] * 2  # forward, then recomputation in the same order
    assert all(router.weight.grad is not None and router.weight.grad.abs().sum() > 0 for router in routers)


def test_without_a_stage_or_a_micro_batch_routers_choose_themselves() -> None:
    router = Router(1)
    replay = new_replay([router])
    x = torch.randn(5, 4)
    router(x)
    with replay.forward(batch_of([0])):  # of the reference model, say
        router(x)
    with replay.old_policy():
        router(x)  # a hook that uses the model
    assert router.seen == [(x @ router.weight).topk(TOPK).indices.tolist()] * 3


def test_engines_choices_are_replayed_in_the_log_prob_pass_too() -> None:
    router = Router(2)  # the second layer
    replay = new_replay([router], from_engines=True)
    experts = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(4 * 3)]).reshape(4, 3, TOPK)
    batch = batch_of([7], rollout_routed_experts=[experts.to(torch.int32)])
    x = torch.randn(5, 4)
    with replay.old_policy(), replay.forward(batch):
        router(x)
    with replay.training(), replay.forward(batch):
        router(x)
    for seen in router.seen:
        assert seen[:4] == experts[:, 1].tolist()
        assert seen[4] == [0, 1]


def test_missing_choices_are_errors_that_say_where_they_come_from() -> None:
    router = Router(3)
    x = torch.randn(5, 4)
    replay = new_replay([router])
    with (
        replay.training(),
        replay.forward(batch_of([4])),
        pytest.raises(RuntimeError, match=r"layer 3.*0 tokens for a forward over 5.*positions \(4,\)"),
    ):
        router(x)
    with replay.old_policy(), replay.forward(batch_of([4])):
        router(x)
    with (
        replay.training(),
        replay.forward(batch_of([4])),
        pytest.raises(RuntimeError, match="experts of 5 tokens for a forward over 3"),
    ):
        router(x[:3])
    engines = new_replay([router], from_engines=True)
    with (
        pytest.raises(ValueError, match="no rollout_routed_experts"),
        engines.old_policy(),
        engines.forward(batch_of([0])),
    ):
        pass


def test_choices_end_with_their_rollout_even_if_it_fails() -> None:
    """The next one has micro-batches of the same positions, whose choices are its own."""
    router, x = Router(1), torch.randn(5, 4)
    replay = new_replay([router])

    def failing_rollout() -> None:
        with replay.one_rollout():
            with replay.old_policy(), replay.forward(batch_of([4])):
                router(x)
            with replay.training(), replay.forward(batch_of([4])):
                router(x[:3])

    with pytest.raises(RuntimeError, match="experts of 5 tokens for a forward over 3"):
        failing_rollout()
    with replay.training(), replay.forward(batch_of([4])), pytest.raises(RuntimeError, match="of 0 tokens"):
        router(x)


def test_without_the_flag_nothing_is_touched() -> None:
    replay = RoutingReplay(run_args())
    with replay.training(), replay.forward({}):
        assert os.environ[STAGE_VARIABLE] == "to be restored"
    assert replay.step_metrics(torch.device("cpu")) == {}
