"""The example is the core's correction by another path: through the loss, its flag and its file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from examples.train_infer_mismatch_helper import mis
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.backends.megatron_utils.train.policy_loss import _correct_importance
from slime.batching.ragged_tensor import RaggedTensor
from tests.support.arguments import dry
from tests.unit.algorithms import brute_force
from tests.unit.algorithms.test_mis import LENGTHS, columns, settings

PATH = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
EXAMPLE = "examples/train_infer_mismatch_helper/mis.yaml"


def test_without_either_the_loss_is_as_it_was():
    data = columns()
    args = settings(use_tis=False, use_rs=False, rs_veto_threshold=0.9)
    loss, masks, metrics = corrected(args, data)
    assert loss is PG_LOSS
    assert all(one is other for one, other in zip(masks, data["loss_masks"], strict=True))
    assert metrics["mis_veto_fraction"].sum() > 0
    assert metrics["mis_weight"].tolist() == [1.0] * sum(LENGTHS)


PG_LOSS = torch.linspace(-1, 1, sum(LENGTHS), dtype=torch.float64, requires_grad=True)


def corrected(args: SimpleNamespace, data: dict[str, Any]) -> Any:
    lengths = {"total_lengths": [n + 4 for n in LENGTHS], "response_lengths": list(LENGTHS)}
    return mis.compute_mis_weights_with_cp(args, pg_loss=PG_LOSS, **data, **lengths)


def test_the_loss_is_multiplied_and_no_gradient_flows_through_weights():
    data = columns()
    data["train_log_probs"] = [values.requires_grad_() for values in data["train_log_probs"]]
    loss, _, metrics = corrected(settings(), data)
    expected = [w for weight in brute_force.mis(settings(), columns())[0] for w in weight]
    weights = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(loss, PG_LOSS * weights)
    (gradient,) = torch.autograd.grad(loss.sum(), PG_LOSS)
    assert torch.allclose(gradient, weights)
    assert not any(values.requires_grad for values in metrics.values())


@pytest.mark.parametrize("level", mis.LEVELS)
def test_ranks_with_parts_of_a_sample_agree(monkeypatch, level):
    """Two context-parallel ranks, each with every other token: together they have what one rank has."""
    args = settings(tis_level=level, use_rs=True, rs_level="geometric", tis_batch_normalize=True)
    data = columns(1)
    whole_loss, whole_masks, whole_metrics = corrected(args, data)
    for rank in (0, 1):
        wholes = iter([data["train_log_probs"], data["rollout_log_probs"]])
        monkeypatch.setattr(ResponseLayout, "whole", lambda *_, wholes=wholes: next(wholes))
        monkeypatch.setattr(
            ResponseLayout, "local", lambda _, column, rank=rank: RaggedTensor.of([v[rank::2] for v in column])
        )
        part = {key: [v[rank::2] for v in values] for key, values in data.items() if key != "loss_masks"}
        mine = torch.cat([v[rank::2] for v in PG_LOSS.split(LENGTHS)])
        lengths = {"total_lengths": [n + 4 for n in LENGTHS], "response_lengths": list(LENGTHS)}
        loss, masks, metrics = mis.compute_mis_weights_with_cp(
            args, pg_loss=mine, loss_masks=data["loss_masks"], **part, **lengths
        )
        assert torch.equal(loss, torch.cat([v[rank::2] for v in whole_loss.split(LENGTHS)]))
        assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in whole_masks]
        for name, values in metrics.items():
            assert torch.equal(values, torch.cat([v[rank::2] for v in whole_metrics[name].split(LENGTHS)]))


def test_the_trainer_calls_it_by_its_flag():
    data = columns(dtype=torch.float32)
    args = settings(custom_tis_function_path=PATH)
    batch = {"loss_masks": data["loss_masks"], "total_lengths": [n + 4 for n in LENGTHS]}
    batch["response_lengths"] = list(LENGTHS)
    log_probs = SimpleNamespace(trainer=data["train_log_probs"], rollout=data["rollout_log_probs"])
    loss, masks, metrics = _correct_importance(args, batch, log_probs, torch.ones(sum(LENGTHS)))
    expected = [w for weight in brute_force.mis(args, data)[0] for w in weight]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert set(metrics) >= {"mis_kl", "mis_ratio", "mis_weight"}
    assert len(masks) == len(LENGTHS)


def test_the_file_is_read_as_a_configuration():
    args = dry("--use-tis", "--custom-tis-function-path", PATH, "--custom-config-path", EXAMPLE)
    with open(EXAMPLE, encoding="utf-8") as file:
        keys = yaml.safe_load(file)
    assert {name: getattr(args, name) for name in keys} == keys
    read = mis.Settings.of(args)
    assert (read.use_tis, read.use_rs, read.normalize, read.veto) == (True, False, True, 1e-4)
    assert (read.tis_lower, read.tis_upper, read.rs_lower, read.rs_upper) == (0.5, 2.0, 0.99, 1.01)
    assert not [warning for warning in args.warnings if "mis.yaml" in warning]
