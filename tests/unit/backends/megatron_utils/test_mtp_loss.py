"""Targets of layers of multi-token prediction, position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.model import mtp_loss
from slime.backends.megatron_utils.model.mtp_loss import MTPTargets, add_mtp_loss, mtp_targets
from slime.backends.megatron_utils.state.parallel import Ranks
from tests.support.arguments import run_args

PROMPTS, RESPONSES = (5, 1, 2), (4, 6, 9)


def _batch() -> dict[str, Any]:
    """Tokens tell their sample and position: 100 * sample + position + 1."""
    lengths = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    masks = [torch.ones(r) for r in RESPONSES]
    masks[2][::3] = 0
    return {
        "unconcat_tokens": [100 * i + torch.arange(1, length + 1) for i, length in enumerate(lengths)],
        "response_lengths": list(RESPONSES),
        "total_lengths": lengths,
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([4, 12, 6]),
    }


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_every_response_token_is_predicted_once_from_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, cp_size: int, per_token: bool
) -> None:
    args = run_args(mtp_num_layers=3, data_pad_size_multiplier=8, calculate_per_token_loss=per_token)
    found: dict[int, dict[int, float]] = {k: {} for k in (1, 2, 3)}
    for rank in range(cp_size):
        monkeypatch.setattr(mtp_loss, "context_parallel", lambda rank=rank: Ranks(rank=rank, size=cp_size))
        batch = _batch()
        row = mtp_loss._packed(args, batch["unconcat_tokens"], batch).tokens[0]
        for k, depth in enumerate(mtp_targets(args, batch).depths, start=1):
            for i, token in enumerate(row.tolist()):  # what the layer sees beside the hidden state of `token`
                last = token == 0 or (token % 100) + k > len(batch["unconcat_tokens"][token // 100])
                assert depth.input_ids[0, i] == (0 if last else token + k)
            for place, target, weight in zip(depth.rows, depth.targets, depth.weights, strict=True):
                assert target == row[place] + k + 1
                assert int(target) not in found[k]
                found[k][int(target)] = float(weight)
    sums = [4, 12, 6]
    for k, seen in found.items():
        expected = {}
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            for j in range(response):
                if prompt + j - k - 1 >= 0:
                    mask = 0.0 if i == 2 and j % 3 == 0 else 1.0
                    expected[100 * i + prompt + j + 1] = mask / (1 if per_token else sums[i])
        assert seen == pytest.approx(expected)


def test_the_loss_is_the_mean_over_layers_times_the_factor() -> None:
    args = run_args(mtp_loss_scaling_factor=0.3)
    further = MTPTargets(depths=(None, None), losses=[torch.tensor(2.0), torch.tensor(4.0)])  # type: ignore[arg-type]
    loss, metrics = add_mtp_loss(args, further, torch.tensor(1.0), {"loss": torch.tensor(1.0)})
    assert float(loss) == pytest.approx(1.9)
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 1.0, "mtp_1_loss": 2.0, "mtp_2_loss": 4.0, "mtp_loss": 3.0,
    }  # fmt: skip


def test_without_layers_nothing_is_added() -> None:
    loss, metrics = torch.tensor(1.0), {"loss": torch.tensor(1.0)}
    assert add_mtp_loss(run_args(), None, loss, metrics) == (loss, metrics)


def test_a_model_that_did_not_run_its_layers_is_an_error() -> None:
    further = MTPTargets(depths=(None,))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="1 layers of multi-token prediction, it has computed 0"):
        add_mtp_loss(run_args(), further, torch.tensor(1.0), {})
