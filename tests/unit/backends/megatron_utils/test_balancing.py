from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.train import balancing
from slime.backends.megatron_utils.train.balancing import (
    AUX,
    SEQ_AUX,
    Balancing,
    Z,
    build_balancing,
    coefficients,
    router_losses,
)
from tests.support.arguments import run_args

GROUP = SimpleNamespace(size=lambda: 1)


def by_loops(logits: list[list[float]], sample: list[int], topk: int, function: str) -> dict[str, float]:
    """The three losses from their definitions, with python's floats."""
    rows = [(number, row) for number, row in zip(sample, logits, strict=True) if number >= 0]
    experts = len(logits[0])

    def balance(rows: list[list[float]]) -> float:
        chosen, mass = [0] * experts, [0.0] * experts
        for row in rows:
            raw = [math.exp(x) if function == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
            scores = [x / sum(raw) for x in raw]
            for e in sorted(range(experts), key=lambda e: -scores[e])[:topk]:
                chosen[e] += 1
            mass = [a + b for a, b in zip(mass, scores, strict=True)]
        return experts * sum(c / topk / len(rows) * m / len(rows) for c, m in zip(chosen, mass, strict=True))

    z = [math.log(sum(math.exp(x) for x in row)) ** 2 for _, row in rows]
    by_sample = [[row for number, row in rows if number == n] for n in sorted({number for number, _ in rows})]
    return {
        AUX: balance([row for _, row in rows]),
        SEQ_AUX: sum(balance(rows) for rows in by_sample),
        Z: sum(z) / len(z),
    }


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("seed", range(50))
def test_losses_of_a_layer_against_loops(function: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 9, (), generator=generator))
    topk = int(torch.randint(1, experts + 1, (), generator=generator))
    lengths = torch.randint(1, 9, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator)
    sample = torch.cat([torch.full((int(n),), i) for i, n in enumerate(lengths)] + [torch.full((seed % 4,), -1)])
    sample = sample[torch.randperm(len(sample), generator=generator)]  # the order of rows is of no account
    logits = 3 * torch.randn(len(sample), experts, dtype=torch.float64, generator=generator)
    router = SimpleNamespace(topk=topk, score_function=function, tp_cp_group=GROUP)
    losses = router_losses([AUX, SEQ_AUX, Z], logits, sample, lengths.double(), router)
    expected = by_loops(logits.tolist(), sample.tolist(), topk, function)
    assert {kind: loss.item() for kind, loss in losses.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_gradients_of_the_losses(function: str) -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    sample, lengths = torch.tensor([0, 0, 1, 1, 1, -1, -1]), torch.tensor([2.0, 3.0], dtype=torch.float64)
    router = SimpleNamespace(topk=2, score_function=function, tp_cp_group=GROUP)

    def total(logits: torch.Tensor) -> torch.Tensor:
        return sum(router_losses([AUX, SEQ_AUX, Z], logits, sample, lengths, router).values())  # type: ignore[return-value]

    assert torch.autograd.gradcheck(total, logits)
    (gradient,) = torch.autograd.grad(total(logits), logits)
    assert torch.equal(gradient[5:], torch.zeros(2, 5, dtype=torch.float64))  # padding
    assert bool((gradient[:5].abs().sum(dim=1) > 0).all())


def test_even_load_is_the_least_that_the_loss_can_be() -> None:
    """Each expert gets as many tokens and as much score: 1, whatever the number of experts (one of them: E)."""
    router = SimpleNamespace(topk=1, score_function="softmax", tp_cp_group=GROUP)
    lengths = torch.tensor([4.0])
    even = router_losses([AUX], 50 * torch.eye(4), torch.zeros(4, dtype=torch.long), lengths, router)
    same = router_losses([AUX], 50 * torch.eye(4)[[0] * 4], torch.zeros(4, dtype=torch.long), lengths, router)
    assert even[AUX].item() == pytest.approx(1)
    assert same[AUX].item() == pytest.approx(4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}, {}),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, {SEQ_AUX: 0.1}),
        ({"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01}, {Z: 0.01}),
        (
            {"moe_router_load_balancing_type": ["none", "aux_loss"], "moe_aux_loss_coeff": [0.0, 0.2]},
            {AUX: 0.2},
        ),
    ],
)
def test_coefficients(flags: dict[str, Any], expected: dict[str, float]) -> None:
    assert coefficients(run_args(**flags)) == expected


class Model(torch.nn.Module):
    """Two layers with routers, one of them in an MTP layer; each makes logits of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.mtp = torch.nn.ModuleList([make_router()]), torch.nn.ModuleList([make_router()])


def make_router(*, bias: torch.Tensor | None = None) -> Any:
    """A ``TopKRouter`` of four experts, as far as ``Balancing`` looks at it."""
    import_megatron()
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=None)
    router.layer_number, router.topk, router.score_function, router.tp_cp_group = 1, 1, "softmax", GROUP
    router.expert_bias, router.local_tokens_per_expert = bias, None if bias is None else torch.zeros(4)
    router.routing = lambda logits: (logits.flatten(0, -2).softmax(-1), logits.flatten(0, -2).argmax(-1)[:, None] == I4)
    return router


I4 = torch.arange(4)
BATCH = {"tokens": torch.zeros(1, 4, dtype=torch.long), "total_lengths": [3]}
DATA = {"loss_masks": [torch.ones(2)]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: None)
    monkeypatch.setattr(balancing, "gather_from_world", lambda mine: [mine])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("trained", [False, True])
def test_mtp_layers_count_where_they_are_trained(trained: bool) -> None:
    model = Model()
    args = run_args(
        num_experts=4, num_layers=1, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1,
        mtp_num_layers=1, enable_mtp_training=trained,
    )  # fmt: skip
    parts = build_balancing(args, [model])
    logits = 50 * torch.eye(4)[[0, 0, 0, 1]][:, None]  # all three tokens choose the same expert, padding another one
    with parts.step(DATA, [[0]]), parts.forward(BATCH):
        model.decoder[0].routing(logits)
        if trained:
            model.mtp[0].routing(50 * torch.eye(4)[[0, 1, 2, 3]][:, None])
    # The routers' L is 4 and, with a third of the tokens on each of three of four experts, 4/3.
    expected = (4 + 4 / 3) / 2 if trained else 4
    assert parts.step_metrics() == {"load_balancing_loss": pytest.approx(expected)}


@pytest.mark.usefixtures("alone")
def test_what_a_failed_step_counted_moves_no_bias() -> None:
    router = make_router(bias=torch.zeros(4))
    parts = Balancing({1: router}, layers=[1])
    logits = 50 * torch.eye(4)[:, None]

    def step(fails: bool) -> None:
        with parts.step(DATA, [[0]]), parts.forward(BATCH):
            router.routing(logits)
            if fails:
                raise RuntimeError("in the middle of a step")

    with pytest.raises(RuntimeError, match="middle"):
        step(fails=True)
    step(fails=False)
    assert router.local_tokens_per_expert.tolist() == [1, 1, 1, 0]  # the fourth row is padding
