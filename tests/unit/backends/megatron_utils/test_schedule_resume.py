"""The learning-rate schedule of a run that is resumed with another length."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.checkpoints.save_load import _load_scheduler
from slime.backends.megatron_utils.state.optimizer import build_scheduler
from tests.support.arguments import run_args

LR = 0.1


def schedule(num_rollout: int, **flags: Any) -> tuple[SimpleNamespace, Any]:
    """The arguments and the schedule of a run of ``num_rollout`` rollouts, each a step of 8 samples."""
    values = {
        "num_rollout": num_rollout, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 8,
        "lr": LR, "min_lr": 0.0, "lr_decay_style": "linear", "lr_decay_iters": None, "weight_decay": 0.0,
    }  # fmt: skip
    args = run_args(**{**values, **flags})
    parameter = torch.nn.Parameter(torch.zeros(1))
    return args, build_scheduler(args, torch.optim.SGD([{"params": [parameter], "max_lr": LR, "min_lr": 0.0}], lr=LR))


def resumed(saved: Any, num_rollout: int, **flags: Any) -> float:
    """The learning rate after a schedule of ``num_rollout`` rollouts has taken over the state of ``saved``."""
    args, scheduler = schedule(num_rollout, **flags)
    _load_scheduler(args, scheduler, {"opt_param_scheduler": saved.state_dict()}, Path("iter_0000003"))
    return float(scheduler.optimizer.param_groups[0]["lr"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def saved() -> Any:
    """The schedule of ten rollouts after four of them."""
    _, scheduler = schedule(10)
    scheduler.step(increment=32)
    return scheduler


def test_a_longer_run_continues_along_its_own_schedule(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert resumed(saved, 10) == pytest.approx(LR * (1 - 4 / 10))
    assert not warnings(caplog)
    assert resumed(saved, 20) == pytest.approx(LR * (1 - 4 / 20))
    [said] = warnings(caplog)
    assert "over the 20 optimizer steps of --num-rollout 20, over 10 until now; --lr-decay-iters 10 keeps" in said


def test_the_warm_up_that_is_a_part_of_the_run_follows_it() -> None:
    _, before = schedule(10, lr_warmup_fraction=0.2)
    before.step(increment=8)
    assert resumed(before, 20, lr_warmup_fraction=0.2) == pytest.approx(LR * 1 / 4)


def test_a_constant_rate_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    _, before = schedule(10, lr_decay_style="constant")
    before.step(increment=32)
    assert resumed(before, 20, lr_decay_style="constant") == LR
    assert not warnings(caplog)


def test_the_checkpoint_s_schedule_on_demand(saved: Any) -> None:
    assert resumed(saved, 20, use_checkpoint_opt_param_scheduler=True) == pytest.approx(LR * (1 - 4 / 10))


def test_lengths_that_flags_give_must_agree(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"learning-rate schedule of this run differs.*total number of iterations"):
        resumed(saved, 20, lr_decay_iters=15)
    with pytest.raises(ValueError, match=r"differs.*warmup"):
        resumed(saved, 20, lr_warmup_iters=2)
    assert resumed(saved, 20, lr_decay_iters=10) == pytest.approx(LR * (1 - 4 / 10))
