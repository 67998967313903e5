"""Importance weights, rejection and veto against loops in double precision written from the formulas."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms import mis
from tests.unit.algorithms import brute_force

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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("level", "mode"), list(itertools.product(mis.LEVELS, mis.MODES)))
def test_weights_of_every_level_and_mode(level, mode, seed):
    args = settings(tis_level=level, tis_mode=mode, tis_lower_bound=0.8)
    data = columns(seed)
    weights, masks, metrics = mis.compute_mis_weights(args, **data)
    expected, expected_masks = brute_force.mis(args, data)
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
        expected, expected_masks = brute_force.mis(args, data)
        assert [mask.tolist() for mask in masks] == expected_masks
        assert all(mask.dtype == torch.int32 for mask in masks)
        for got, want in zip(weights, expected, strict=True):
            assert got.tolist() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("level", mis.LEVELS)
def test_normalized_weights_have_mean_one(level):
    args = settings(tis_level=level, tis_batch_normalize=True, use_rs=True, rs_level="token", rs_upper_bound=1.5)
    data = columns(3)
    weights, masks, _ = mis.compute_mis_weights(args, **data)
    if level == "token":
        total = sum(float(x) for weight, mask in zip(weights, masks, strict=True) for x in weight[mask > 0])
        assert total / sum(int(mask.sum()) for mask in masks) == pytest.approx(1.0)
    else:
        left = [float(weight[0]) for weight, mask in zip(weights, masks, strict=True) if mask.sum()]
        assert sum(left) / len(left) == pytest.approx(1.0)
    plain, _ = brute_force.mis(args, data)
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


@pytest.mark.parametrize("mode", mis.MODES)
def test_the_names_of_the_older_example_have_the_numbers_of_the_formulas(mode):
    args = settings(
        tis_mode=mode, tis_lower_bound=0.9, use_rs=True, rs_lower_bound=0.8, rs_upper_bound=1.2, rs_veto_threshold=0.6,
        tis_batch_normalize=True,
    )  # fmt: skip
    data = columns(5)
    weights, masks, metrics = mis.compute_mis_weights(args, **data)
    plain, _ = brute_force.mis(args, data)
    sides = {"truncate": ["truncate_fraction"]}.get(mode, [f"{mode}_fraction_low", f"{mode}_fraction_high"])
    assert {name for name in metrics if "fraction" in name and "tis" in name} == {f"mis_tis_{side}" for side in sides}
    for i, (train, rollout, mask) in enumerate(zip(*data.values(), strict=True)):
        d = [a - b for a, b in zip(train.tolist(), rollout.tolist(), strict=True)]
        used = [t for t, on in enumerate(mask.tolist()) if on]
        logs = {"training": train, "rollout": rollout}
        logs = {name: -sum(float(column[t]) for t in used) / max(len(used), 1) for name, column in logs.items()}
        apart = logs["training"] - logs["rollout"]
        ratios = [math.exp(x) for x in d]
        whole = {
            "training_log_ppl": logs["training"], "rollout_log_ppl": logs["rollout"], "log_ppl_diff": apart,
            "training_ppl": math.exp(logs["training"]), "rollout_ppl": math.exp(logs["rollout"]),
            "log_ppl_abs_diff": abs(apart), "ppl_ratio": math.exp(apart),
            "chi2_seq": math.exp(2 * sum(d[t] for t in used)) - 1,
            "catastrophic_seq_fraction": float(any(ratios[t] < 0.6 for t in used)),
            "batch_norm_factor": float(weights[0][0]) / plain[0][0],
        }  # fmt: skip
        expected = {name: [value] * len(d) for name, value in whole.items()} | {
            "chi2_token": [r * r - 1 for r in ratios],
            "tis_weight_before_bound": ratios,
            "tis_weight_after_bound": plain[i],
            f"tis_{sides[-1]}": [float(r > 1.3) for r in ratios],
            "rs_mask_fraction_low": [float(r < 0.8) for r in ratios],
            "rs_mask_fraction_high": [float(r > 1.2) for r in ratios],
            "catastrophic_token_fraction": [float(r < 0.6 and t in used) for t, r in enumerate(ratios)],
            "is_ratio_mean_after_tis_rs": [w * m for w, m in zip(plain[i], masks[i].tolist(), strict=True)],
        }
        if mode != "truncate":
            expected[f"tis_{sides[0]}"] = [float(r < 0.9) for r in ratios]
        for name, numbers in expected.items():
            assert metrics[f"mis_{name}"][i].tolist() == pytest.approx(numbers, abs=1e-10), name


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
