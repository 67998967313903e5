"""StatelessAdam against the first step of torch's Adam and AdamW, made afresh for every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.state.stateless_adam import StatelessAdam

CASES = 1000


def options_of(case: int) -> dict[str, Any]:
    """Return random options; every tenth case has a zero of some kind in it."""
    draw = random.Random(case)
    return {
        "lr": draw.choice([10 ** draw.uniform(-6, 0), 0.0 if case % 10 == 0 else 1e-3]),
        "betas": (draw.uniform(0, 0.999), draw.uniform(0, 0.9999)),
        "eps": 10 ** draw.uniform(-12, -1),
        "weight_decay": draw.choice([0.0, draw.uniform(0, 1)]),
        "maximize": draw.random() < 0.3,
    }


def tensors_of(case: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return float64 values and two gradients of widely different sizes, with exact zeros among them."""
    generator = torch.Generator().manual_seed(case)
    shape = [(), (7,), (3, 5), (0,)][case % 4]

    def gradient() -> torch.Tensor:
        size = 10 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * 12 - 9)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn * size * (torch.rand(shape, generator=generator) > 0.1)

    return torch.randn(shape, generator=generator, dtype=torch.float64), [gradient() for _ in range(2)]


def test_every_step_is_the_first_step_of_a_fresh_adam() -> None:
    worst = 0.0
    for case in range(CASES):
        options, (values, gradients) = options_of(case), tensors_of(case)
        adam_w = case % 2 == 0
        ours, theirs = (torch.nn.Parameter(values.clone()) for _ in range(2))
        stateless = StatelessAdam([ours], **options, adam_w_mode=adam_w)
        for gradient in gradients:
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            fresh = (torch.optim.AdamW if adam_w else torch.optim.Adam)([theirs], **options)
            stateless.step()
            fresh.step()
            worst = max(worst, float((ours - theirs).detach().abs().max()) if values.numel() else 0.0)
        assert not stateless.state
    assert worst <= 1e-10


def test_without_bias_correction_both_moments_stay_small() -> None:
    for case in range(CASES):
        options, (values, gradients) = options_of(case), tensors_of(case)
        (beta1, beta2), lr, eps, decay = options["betas"], options["lr"], options["eps"], options["weight_decay"]
        adam_w = case % 2 == 0
        parameter = torch.nn.Parameter(values.clone())
        stateless = StatelessAdam([parameter], **options, adam_w_mode=adam_w, bias_correction=False)
        expected = [float(v) for v in values.flatten()]
        for gradient in gradients:
            parameter.grad = gradient.clone()
            stateless.step()
            for i, g in enumerate(gradient.flatten().tolist()):
                g = -g if options["maximize"] else g
                if adam_w:
                    expected[i] -= lr * decay * expected[i]
                else:
                    g += decay * expected[i]
                first, second = (1 - beta1) * g, (1 - beta2) * g * g
                expected[i] -= lr * first / (second**0.5 + eps)
        torch.testing.assert_close(
            parameter.detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10
        )


def test_groups_keep_their_options_and_step_stays_one() -> None:
    slow, fast, still = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = StatelessAdam([{"params": [slow, still], "lr": 0.01}, {"params": [fast]}], lr=1.0, eps=0.0)
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    slow.grad = fast.grad = torch.tensor([2.0, -3.0])
    assert optimizer.step(lambda: 5.0) == 5.0
    optimizer.step()
    assert slow.tolist() == pytest.approx([-0.02, 0.02])
    assert fast.tolist() == [-2.0, 2.0]
    assert still.tolist() == [0.0, 0.0]  # it has no gradient
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_moments_of_another_adam_are_left_out_of_a_load() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([parameter], lr=0.25)
    parameter.grad = torch.ones(2)
    adam.step()
    stateless = StatelessAdam([parameter], lr=1.0)
    stateless.load_state_dict(adam.state_dict())
    assert not stateless.state
    assert stateless.state_dict()["state"] == {}
    assert (stateless.param_groups[0]["lr"], stateless.param_groups[0]["step"]) == (0.25, 1)
    stateless.step()
    assert not stateless.state


def test_half_precision_is_stepped_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = StatelessAdam([parameter], lr=0.1, weight_decay=0.1, eps=0.0)
    parameter.grad = torch.ones(1, dtype=torch.bfloat16)
    optimizer.step()
    # 1 - 0.01 - 0.1 in fp32, rounded once; stepped in bf16 it would be 0.98828125 - 0.1 and rounded twice
    assert parameter.item() == torch.tensor(0.89).bfloat16().item()


def test_decoupled_gradients_are_read_and_cleared() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = StatelessAdam([parameter], lr=0.5, use_decoupled_grad=True, set_grad_none=False, fused=True)
    parameter.grad, parameter.decoupled_grad = torch.ones(1), -torch.ones(1)  # type: ignore[attr-defined]
    optimizer.step()
    assert parameter.item() == pytest.approx(0.5)
    optimizer.zero_grad()
    assert parameter.grad.item() == parameter.decoupled_grad.item() == 0  # type: ignore[attr-defined, union-attr]
    optimizer.zero_grad(set_to_none=True)
    assert parameter.grad is parameter.decoupled_grad is None  # type: ignore[attr-defined]


def test_what_would_need_state_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(NotImplementedError, match="amsgrad"):
        StatelessAdam([parameter], amsgrad=True)
    with pytest.raises(NotImplementedError, match="master weights"):
        StatelessAdam([parameter], master_weights=True)
    with pytest.raises(ValueError, match=r"betas\[1\] is 1.0"):
        StatelessAdam([parameter], betas=(0.9, 1.0))
    optimizer = StatelessAdam([parameter])
    parameter.grad = torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
