"""Importance weights, rejection and veto against loops in double precision written from the formulas."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from examples.train_infer_mismatch_helper import mis
from slime.backends.megatron_utils import cp_utils
from slime.backends.megatron_utils.policy_loss import _correct_importance
from tests.support.arguments import dry

PATH = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
EXAMPLE = "examples/train_infer_mismatch_helper/mis.yaml"
LENGTHS = (5, 1, 9, 3)


def settings(**changes: Any) -> SimpleNamespace:
    values = {"use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 1.3}
    return SimpleNamespace(**{**values, **changes})


def columns(seed: int = 0, spread: float = 0.4, dtype: torch.dtype = torch.float64) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rollout = [-3 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.05 for n in LENGTHS]
    train = [r + spread * torch.randn(len(r), generator=generator, dtype=torch.float64) for r in rollout]
    masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in LENGTHS]
    masks[0] = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    return {
        "train_log_probs": [t.to(dtype) for t in train],
        "rollout_log_probs": [r.to(dtype) for r in rollout],
        "loss_masks": masks,
    }


def slow(args: SimpleNamespace, data: dict[str, list[torch.Tensor]]) -> tuple[list[list[float]], list[list[int]]]:
    """Weights and masks, token by token."""
    upper = args.tis_upper_bound
    lower = getattr(args, "tis_lower_bound", None)
    lower = 1 / upper if lower is None else lower
    rs_lower, rs_upper = getattr(args, "rs_lower_bound", lower), getattr(args, "rs_upper_bound", upper)
    all_weights, all_masks = [], []
    for train, rollout, mask in zip(*data.values(), strict=True):
        d = [float(a) - float(b) for a, b in zip(train, rollout, strict=True)]
        m = [int(x) for x in mask]
        used = [x for x, on in zip(d, m, strict=True) if on]
        joint = {"sequence": math.exp(sum(used)), "geometric": math.exp(sum(used) / len(used)) if used else 1.0}
        weights, kept = [], []
        for x, on in zip(d, m, strict=True):
            ratio = joint.get(args.tis_level, math.exp(x))
            if args.tis_mode == "truncate":
                weight = min(ratio, upper)
            elif args.tis_mode == "clip":
                weight = min(max(ratio, lower), upper)
            else:
                weight = ratio if lower <= ratio <= upper else 0.0
            weights.append(weight if args.use_tis else 1.0)
            ratio = joint.get(getattr(args, "rs_level", args.tis_level), math.exp(x))
            kept.append(int(on and (rs_lower <= ratio <= rs_upper)))
        veto = getattr(args, "rs_veto_threshold", None)
        if veto is not None and any(math.exp(x) < veto for x in used):
            kept = [0] * len(kept)
        all_weights.append(weights)
        all_masks.append(kept if getattr(args, "use_rs", False) else m)
    return all_weights, all_masks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("level", "mode"), list(itertools.product(mis.LEVELS, mis.MODES)))
def test_weights_of_every_level_and_mode(level, mode, seed):
    args = settings(tis_level=level, tis_mode=mode, tis_lower_bound=0.8)
    data = columns(seed)
    weights, masks, metrics = mis.compute_mis_weights(args, **data)
    expected, expected_masks = slow(args, data)
    for got, want in zip(weights, expected, strict=True):
        assert got.tolist() == pytest.approx(want, abs=1e-12)
    assert [mask.tolist() for mask in masks] == expected_masks
    assert metrics["mis_weight"] is weights


@pytest.mark.parametrize("veto", [None, 0.7])
@pytest.mark.parametrize("rs_level", mis.LEVELS)
@pytest.mark.parametrize("bounds", [{}, {"rs_lower_bound": 0.9, "rs_upper_bound": 1.1}])
def test_rejection_and_veto(rs_level, veto, bounds):
    for seed in range(5):
        args = settings(use_rs=True, rs_level=rs_level, rs_veto_threshold=veto, **bounds)
        data = columns(seed)
        weights, masks, _ = mis.compute_mis_weights(args, **data)
        expected, expected_masks = slow(args, data)
        assert [mask.tolist() for mask in masks] == expected_masks
        assert all(mask.dtype == torch.int32 for mask in masks)
        for got, want in zip(weights, expected, strict=True):
            assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_without_either_the_loss_is_as_it_was():
    data = columns()
    args = settings(use_tis=False, use_rs=False, rs_veto_threshold=0.9)
    loss, masks, metrics = corrected(args, data)
    assert loss is PG_LOSS
    assert all(one is other for one, other in zip(masks, data["loss_masks"], strict=True))
    assert metrics["mis_veto_fraction"].sum() > 0
    assert metrics["mis_weight"].tolist() == [1.0] * sum(LENGTHS)


@pytest.mark.parametrize("level", mis.LEVELS)
def test_normalised_weights_have_mean_one(level):
    args = settings(tis_level=level, tis_batch_normalize=True, use_rs=True, rs_level="token", rs_upper_bound=1.5)
    data = columns(3)
    weights, masks, _ = mis.compute_mis_weights(args, **data)
    if level == "token":
        total = sum(float(x) for weight, mask in zip(weights, masks, strict=True) for x in weight[mask > 0])
        assert total / sum(int(mask.sum()) for mask in masks) == pytest.approx(1.0)
    else:
        left = [float(weight[0]) for weight, mask in zip(weights, masks, strict=True) if mask.sum()]
        assert sum(left) / len(left) == pytest.approx(1.0)
    plain, _ = slow(args, data)
    factors = {round(float(w[0]) / p[0], 9) for w, p in zip(weights, plain, strict=True)}
    assert len(factors) == 1


def test_samples_without_a_trained_token_and_extreme_ratios():
    data = {
        "train_log_probs": [torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, -1.0])],
        "rollout_log_probs": [torch.tensor([0.0, -1e4]), torch.tensor([-1.0, -1.0])],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0, 0])],
    }
    for level, mode in itertools.product(mis.LEVELS, mis.MODES):
        args = settings(tis_level=level, tis_mode=mode, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True)
        weights, masks, metrics = mis.compute_mis_weights(args, **data)
        assert all(torch.isfinite(values).all() for values in (*weights, *metrics["mis_k3_kl"]))
        assert [mask.tolist() for mask in masks] == [[0, 0], [0, 0]]


def test_the_divergence_is_estimated():
    """Of log-probs of all outcomes, weighed by the rollout's probability, both estimators give the very KL."""
    rollout, train = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    data = {"train_log_probs": [train.log()], "rollout_log_probs": [rollout.log()], "loss_masks": [torch.ones(3)]}
    _, _, metrics = mis.compute_mis_weights(settings(), **data)
    kl = sum(float(r) * math.log(float(r) / float(t)) for r, t in zip(rollout, train, strict=True))
    for name in ("mis_kl", "mis_k3_kl"):
        assert float((metrics[name][0] * rollout).sum()) == pytest.approx(kl, abs=1e-12)
    assert metrics["mis_train_log_ppl"][0].tolist() == pytest.approx([-float(train.log().mean())] * 3)


PG_LOSS = torch.linspace(-1, 1, sum(LENGTHS), dtype=torch.float64, requires_grad=True)


def corrected(args: SimpleNamespace, data: dict[str, Any]) -> Any:
    lengths = {"total_lengths": [n + 4 for n in LENGTHS], "response_lengths": list(LENGTHS)}
    return mis.compute_mis_weights_with_cp(args, pg_loss=PG_LOSS, **data, **lengths)


def test_the_loss_is_multiplied_and_no_gradient_flows_through_weights():
    data = columns()
    data["train_log_probs"] = [values.requires_grad_() for values in data["train_log_probs"]]
    loss, _, metrics = corrected(settings(), data)
    expected = [w for weight in slow(settings(), columns())[0] for w in weight]
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
        monkeypatch.setattr(cp_utils, "all_gather_samples_with_cp", lambda *_, wholes=wholes: next(wholes))
        monkeypatch.setattr(cp_utils, "slice_log_prob_with_cp", lambda v, total, n, rank=rank: v[rank::2])
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
    expected = [w for weight in slow(args, data)[0] for w in weight]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert set(metrics) >= {"mis_kl", "mis_ratio", "mis_weight"}
    assert len(masks) == len(LENGTHS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tis_level": "word"}, "tis_level 'word': expected one of token, sequence, geometric"),
        ({"tis_mode": "cut"}, "tis_mode 'cut': expected one of truncate, clip, mask"),
        ({"rs_level": "batch"}, "rs_level 'batch'"),
        ({"tis_upper_bound": "2.0x"}, "tis_upper_bound '2.0x': expected a ratio"),
        ({"rs_veto_threshold": -1}, "rs_veto_threshold -1"),
        ({"tis_lower_bound": 3.0}, "tis_lower_bound 3 is above tis_upper_bound 1.3"),
        ({"rs_lower_bound": 2.0}, "rs_lower_bound 2 is above rs_upper_bound 1.3"),
    ],
)
def test_settings_that_make_no_sense_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        mis.compute_mis_weights(settings(**changes), **columns())


def test_lengths_that_differ_are_an_error():
    data = columns()
    data["loss_masks"][2] = torch.ones(4)
    with pytest.raises(ValueError, match="9 log-probs of the trainer, 9 of the rollout and a mask of 4"):
        mis.compute_mis_weights(settings(), **data)


def test_the_file_is_read_as_a_configuration():
    args = dry("--use-tis", "--custom-tis-function-path", PATH, "--custom-config-path", EXAMPLE)
    with open(EXAMPLE, encoding="utf-8") as file:
        keys = yaml.safe_load(file)
    assert {name: getattr(args, name) for name in keys} == keys
    read = mis.Settings.of(args)
    assert (read.use_tis, read.use_rs, read.normalize, read.veto) == (True, False, True, 1e-4)
    assert (read.tis_lower, read.tis_upper, read.rs_lower, read.rs_upper) == (0.5, 2.0, 0.99, 1.01)
    assert not [warning for warning in args.warnings if "mis.yaml" in warning]
