"""Importance sampling and rejection where engine and trainer disagree.

``truncated_importance_weights`` and ``icepop_weights`` are per token, with two bounds (``--use-tis``).
``compute_mis_weights`` has levels, modes, rejection and a veto, the keys below. With
d_t = log p_train(t) - log p_rollout(t) over the trained tokens of a sample, the ratio of its token t is

    token      exp(d_t)
    sequence   exp(sum d)    the ratio of the whole response: unbiased, of the largest variance
    geometric  exp(mean d)   the same per token, as in GSPO (arXiv:2507.18071)

``use_tis`` multiplies the loss by a function of the ratio at ``tis_level``, with L = ``tis_lower_bound`` (default 1/U)
and U = ``tis_upper_bound``; no gradient flows through it:

    truncate   min(ratio, U)                       (TIS, Yao et al. 2025; as in V-trace, arXiv:1802.01561)
    clip       min(max(ratio, L), U)
    mask       ratio if L <= ratio <= U else 0     (IcePop, arXiv:2510.18855; MIS)

``use_rs`` takes tokens whose ratio at ``rs_level`` is outside of [``rs_lower_bound``, ``rs_upper_bound``] (default: the
bounds above) out of the loss, and ``rs_veto_threshold`` whole samples with a token whose own ratio is below it.
``tis_batch_normalize`` divides the weights by their mean over what is left of the micro-batch: over tokens, or over
samples where a sample has one ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slime.algorithms.mismatch import LARGEST_LOG_RATIO

if TYPE_CHECKING:
    from slime.arguments.args import Args

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


class ImportanceWeights(NamedTuple):
    """Per-token tensors without gradient. weights: factors for the policy loss. ratio: ``p_train / p_rollout``.
    clipped: 1 where the weight differs from the ratio. deviation: ``|ratio - 1|``."""

    weights: Tensor
    ratio: Tensor
    clipped: Tensor
    deviation: Tensor


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float
) -> ImportanceWeights:
    """Truncated importance sampling (Yao et al. 2025): ``clamp(exp(log p_train - log p_rollout), low, high)``."""
    ratio = torch.exp(train_log_probs.detach() - rollout_log_probs.detach())
    return _compared(ratio.clamp(low, high), ratio)


def icepop_weights(train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> ImportanceWeights:
    """IcePop (Ling team 2025): the ratio itself within [low, high], 0 outside: such tokens train nothing."""
    ratio = torch.exp(train_log_probs.detach() - rollout_log_probs.detach())
    return _compared(torch.where((ratio >= low) & (ratio <= high), ratio, 0), ratio)


def _compared(weights: Tensor, ratio: Tensor) -> ImportanceWeights:
    return ImportanceWeights(weights, ratio, (weights != ratio).to(ratio.dtype), (ratio - 1).abs())


@dataclass(frozen=True)
class Settings:
    """The checked values of the keys that ``--custom-config-path`` has put on the namespace."""

    use_tis: bool
    use_rs: bool
    tis_level: str
    tis_mode: str
    tis_lower: float
    tis_upper: float
    rs_level: str
    rs_lower: float
    rs_upper: float
    veto: float | None
    normalize: bool

    @classmethod
    def of(cls, args: Args) -> Settings:
        """Raises ValueError naming the key."""
        level, mode = _choice(args, "tis_level", LEVELS, "token"), _choice(args, "tis_mode", MODES, "truncate")
        upper = _bound(args, "tis_upper_bound", 2.0)
        lower = _bound(args, "tis_lower_bound", 1.0 / upper if upper else 0.0)
        rs_lower, rs_upper = _bound(args, "rs_lower_bound", lower), _bound(args, "rs_upper_bound", upper)
        for name, low, high in (("tis", lower, upper), ("rs", rs_lower, rs_upper)):
            if low > high:
                raise ValueError(f"{name}_lower_bound {low:g} is above {name}_upper_bound {high:g}")
        return cls(
            use_tis=args.use_tis,
            use_rs=bool(getattr(args, "use_rs", False)),
            tis_level=level,
            tis_mode=mode,
            tis_lower=lower,
            tis_upper=upper,
            rs_level=_choice(args, "rs_level", LEVELS, level),
            rs_lower=rs_lower,
            rs_upper=rs_upper,
            veto=None if getattr(args, "rs_veto_threshold", None) is None else _bound(args, "rs_veto_threshold", 0.0),
            normalize=bool(getattr(args, "tis_batch_normalize", False)),
        )


def importance_ratio(level: str, difference: Tensor, trained: Tensor) -> Tensor:
    """Return the ratio of every token [n] at ``level``; one of a sequence is the same for all of its tokens.

    difference: d [n]. trained: 1 at trained tokens, else 0 [n]. Log-ratios are bounded to +-20.
    """
    if level == "token":
        log_ratio = difference
    else:
        total = (difference * trained).sum()
        log_ratio = (total if level == "sequence" else total / trained.sum().clamp(min=1)).expand_as(difference)
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def bounded_weight(mode: str, ratio: Tensor, lower: float, upper: float) -> Tensor:
    """Return the weights [n] that ``mode`` makes of ratios [n]: truncate, clip or mask."""
    if mode == "truncate":
        return ratio.clamp(max=upper)
    if mode == "clip":
        return ratio.clamp(lower, upper)
    return torch.where((ratio < lower) | (ratio > upper), torch.zeros_like(ratio), ratio)


def vetoed_tokens(difference: Tensor, trained: Tensor, threshold: float) -> Tensor:
    """Return bool [n]: trained tokens that the trainer finds less likely than ``threshold`` times the engine."""
    return (importance_ratio("token", difference, trained) < threshold) & (trained > 0)


def compute_mis_weights(
    args: Args,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Return (weights, masks, metrics) of whole responses: lists with one tensor [response_length] per sample.

    Weights are 1 without ``use_tis``; masks are 0 on what is rejected, else as they came. The metrics are per token,
    to be averaged over the tokens of ``loss_masks``. Nothing carries a gradient. Raises ValueError for keys that are
    wrong and for columns of different lengths.
    """
    settings = Settings.of(args)
    weights: list[Tensor] = []
    masks: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {}
    for train, rollout, loss_mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        if not train.shape == rollout.shape == loss_mask.shape:
            raise ValueError(
                f"a sample has {len(train)} log-probs of the trainer, {len(rollout)} of the rollout and a mask of "
                f"{len(loss_mask)}"
            )
        difference, trained = (train - rollout).detach(), loss_mask.to(train.dtype)
        weight, found = _weights(settings, difference, trained)
        kept, rejected = _rejection(settings, difference, trained)
        weights.append(weight)
        masks.append((loss_mask * kept.to(loss_mask.dtype)) if settings.use_rs else loss_mask)
        mismatch = _mismatch(train.detach(), rollout.detach(), difference, trained)
        after = {"mis_is_ratio_mean_after_tis_rs": weight * (masks[-1] != 0)}
        for name, values in {**found, **rejected, **mismatch, **after}.items():
            metrics.setdefault(name, []).append(values)
    if settings.use_tis and settings.normalize:
        factor = _normalizer(settings, weights, masks)
        weights = [weight * factor for weight in weights]
        metrics["mis_batch_norm_factor"] = [factor.expand_as(weight) for weight in weights]
    metrics["mis_weight"] = weights
    return weights, masks, metrics


def _weights(settings: Settings, difference: Tensor, trained: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = importance_ratio(settings.tis_level, difference, trained)
    low, high = ratio < settings.tis_lower, ratio > settings.tis_upper
    if settings.tis_mode == "truncate":
        low = torch.zeros_like(low)  # it has no lower bound
    metrics = {
        "mis_ratio": ratio,
        "mis_fraction_low": low.to(ratio.dtype),
        "mis_fraction_high": high.to(ratio.dtype),
    }
    if not settings.use_tis:
        return torch.ones_like(ratio), metrics
    weight = bounded_weight(settings.tis_mode, ratio, settings.tis_lower, settings.tis_upper)
    sides = metrics["mis_fraction_low"], metrics["mis_fraction_high"]
    return weight, metrics | of_bounds(settings.tis_mode, ratio, weight, *sides)


def _rejection(settings: Settings, difference: Tensor, trained: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return which tokens are kept, as bools, and why others would not be; without ``use_rs`` only for the metrics."""
    ratio = importance_ratio(settings.rs_level, difference, trained)
    low, high = ratio < settings.rs_lower, ratio > settings.rs_upper
    outside = low | high
    metrics = {"mis_rs_fraction": outside.to(ratio.dtype)}
    if settings.use_rs:
        metrics["mis_rs_mask_fraction_low"] = low.to(ratio.dtype)
        metrics["mis_rs_mask_fraction_high"] = high.to(ratio.dtype)
    if settings.veto is not None:
        catastrophic = vetoed_tokens(difference, trained, settings.veto)
        vetoed = catastrophic.any().expand_as(outside)
        metrics["mis_veto_token_fraction"] = catastrophic.to(ratio.dtype)
        metrics["mis_veto_fraction"] = vetoed.to(ratio.dtype)
        metrics["mis_catastrophic_token_fraction"] = metrics["mis_veto_token_fraction"]
        metrics["mis_catastrophic_seq_fraction"] = metrics["mis_veto_fraction"]
        outside = outside | vetoed
    return ~outside, metrics


def _mismatch(train: Tensor, rollout: Tensor, difference: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Return the mismatch of the two: KL(rollout || train) by its estimators k1 and k3, log-perplexities and more."""
    count = trained.sum().clamp(min=1)
    bounded = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    train_log_ppl, rollout_log_ppl = (
        (-(column * trained).sum() / count).expand_as(train) for column in (train, rollout)
    )
    return {
        "mis_kl": -difference,
        "mis_k3_kl": torch.expm1(bounded) - bounded,
        "mis_train_log_ppl": train_log_ppl,
        "mis_rollout_log_ppl": rollout_log_ppl,
        **perplexities(train_log_ppl, rollout_log_ppl),
        **chi_squared(difference, trained),
    }


def _normalizer(settings: Settings, weights: list[Tensor], masks: list[Tensor]) -> Tensor:
    """One over the mean over trained tokens, or over samples with one; on the device, without waiting for it."""
    left = torch.stack([mask.sum() for mask in masks]).to(weights[0].dtype)
    if settings.tis_level == "token":
        total = torch.stack([(weight * mask).sum() for weight, mask in zip(weights, masks, strict=True)]).sum()
        count = left.sum()
    else:
        alive = left > 0
        zero = weights[0].new_zeros(())
        first = torch.stack([weight[0] if weight.numel() else zero for weight in weights])
        total, count = (first * alive).sum(), alive.sum().to(first.dtype)
    return torch.where(total > 0, count / total, torch.ones_like(total))


def _choice(args: Args, name: str, choices: Sequence[str], default: str) -> str:
    value = getattr(args, name, None) or default
    if value not in choices:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(choices)}")
    return str(value)


def _bound(args: Args, name: str, default: float) -> float:
    value = getattr(args, name, None)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} {value!r}: expected a ratio of probabilities, a number from 0 up")
    return float(value)


# Measurements under the names that dashboards of the example in slime <= 0.3.1 have: where there is the same number it
# is that; perplexities, their ratio and chi-squared divergences have no other name. All are per token of one sample, to
# be averaged over trained tokens.


def perplexities(train_log_ppl: Tensor, rollout_log_ppl: Tensor) -> dict[str, Tensor]:
    """Return how likely a response is to trainer and engine, of its log-perplexities [n]."""
    difference = train_log_ppl - rollout_log_ppl
    return {
        "mis_training_log_ppl": train_log_ppl,
        "mis_training_ppl": train_log_ppl.exp(),
        "mis_rollout_ppl": rollout_log_ppl.exp(),
        "mis_log_ppl_diff": difference,
        "mis_log_ppl_abs_diff": difference.abs(),
        "mis_ppl_ratio": difference.exp(),
    }


def chi_squared(difference: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Return ``E[ratio^2] - 1`` [n] of tokens and of the whole response: the variance of importance weights.

    difference: log p_train - log p_rollout [n]. trained: 1 at trained tokens, else 0 [n].
    """

    def squared(log_ratio: Tensor) -> Tensor:
        return (2 * log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).exp() - 1

    total = torch.where(trained != 0, difference, 0).sum().expand_as(difference)
    return {"mis_chi2_token": squared(difference), "mis_chi2_seq": squared(total)}


def of_bounds(mode: str, ratio: Tensor, weight: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return the weights [n] before and after the bounds of ``mode``, and what is below and above them."""
    named = {"mis_tis_weight_before_bound": ratio, "mis_tis_weight_after_bound": weight}
    if mode == "truncate":
        return named | {"mis_tis_truncate_fraction": high}
    return named | {f"mis_tis_{mode}_fraction_low": low, f"mis_tis_{mode}_fraction_high": high}
