"""The policy-gradient loss of one micro-batch: PPO-clip and its variants, importance correction, KL, entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.estimators import Estimator, estimator_of
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.losses import compute_cispo_loss, compute_gspo_kl, compute_opsm_mask, compute_policy_loss
from slime.algorithms.reducers import constant_length, turn_mean
from slime.algorithms.trained_tokens import finite_elsewhere
from slime.arguments.args import Args
from slime.backends.megatron_utils.train.cp_utils import Reducer, ResponseLayout
from slime.backends.megatron_utils.train.data import LossBatch, may_overwrite_logits
from slime.backends.megatron_utils.train.hooks import (
    REDUCER_KEYWORDS,
    checked_correction,
    checked_reducer,
    optional_function,
)
from slime.backends.megatron_utils.train.importance import vanilla_tis_function
from slime.backends.megatron_utils.train.response_logits import (
    get_log_probs_and_entropy,
    note_finite_samples,
    top_p_keywords,
)
from slime.batching.ragged_tensor import RaggedTensor, flat
from slime.utils.declared import with_defaults

Column = Sequence[Tensor]
"""One local tensor [n_local] per sample."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the response tokens, by who gave them. ``old`` is the policy that the ratio is taken against."""

    current: Column
    trainer: Column
    rollout: Column | None
    old: Column


def policy_loss_function(
    args: Args, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics), scalars reduced by ``sum_of_sample_mean``.

    ``loss = pg_loss - entropy_coef * entropy + kl_loss_coef * KL(policy, reference)``, where pg_loss is that of
    ``args.advantage_estimator``, with sequences masked by ``use_opsm`` and corrected by ``use_tis``. Metrics:
    ``loss, pg_loss, entropy_loss, pg_clipfrac, ppo_kl`` and, where they apply, ``train_rollout_logprob_abs_diff,
    kl_loss, opd_reverse_kl, ois, tis, tis_clipfrac, tis_abs, opsm_clipfrac`` and those of a custom correction.
    """
    args = with_defaults(args)
    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        overwrite_logits=may_overwrite_logits(args, batch),
        **top_p_keywords(batch),
    )
    log_probs = _log_probs(args, batch, result["log_probs"])
    note_finite_samples(batch, log_probs.current, log_probs.old, batch["advantages"])
    if isinstance(batch, LossBatch):
        batch.trainer_log_probs = log_probs.trainer  # for the mismatch meter
    layout, estimator, current = ResponseLayout.of(batch), estimator_of(args), flat(log_probs.current)
    [advantages] = finite_elsewhere([layout.local(batch["loss_masks"]).values], [flat(batch["advantages"])])

    ppo_kl = _ppo_kl(estimator, layout, batch, log_probs)
    bounds = (args.eps_clip, args.eps_clip_high)
    if estimator.loss == "cispo":
        pg_loss, pg_clipfrac = compute_cispo_loss(ppo_kl, current, advantages, *bounds)
    else:
        pg_loss, pg_clipfrac = compute_policy_loss(ppo_kl, advantages, *bounds, args.eps_clip_c)
    metrics: dict[str, Tensor] = {}
    if args.use_opsm:
        keep = _off_policy_sequences(args, layout, batch, log_probs)
        pg_loss, metrics["opsm_clipfrac"] = pg_loss * keep, sum_of_sample_mean(1 - keep)

    reduce, masks = sum_of_sample_mean, batch["loss_masks"]
    if args.use_tis or args.get_mismatch_metrics:
        pg_loss, masks, tis_metrics = _correct_importance(args, batch, log_probs, pg_loss)
        # The correction's own metrics are means over the tokens that were trained before it masked any.
        tis_metrics = {"ois": (-ppo_kl).exp().detach(), **tis_metrics}
        metrics.update({name: sum_of_sample_mean(values) for name, values in tis_metrics.items()})
    if masks is not batch["loss_masks"]:
        reduce = _reducer(args, layout, batch, masks)

    # of what the loss is made of; metrics weigh as they do in other runs
    terms = _turn_mean(layout, batch, masks) if args.pg_loss_reducer == "turn_mean" else reduce
    loss = pg = _pg_reducer(args, layout, batch, masks, terms)(pg_loss)
    entropy = terms(torch.cat(result["entropy"]))
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * entropy
    if args.use_kl_loss:
        kl = terms(_kl_to_reference(args, batch, log_probs))
        loss = loss + args.kl_loss_coef * kl
        metrics["kl_loss"] = kl.detach()
    metrics.update(_comparisons(batch, log_probs, reduce))
    return loss, {
        "loss": loss.detach(),
        "pg_loss": pg.detach(),
        "entropy_loss": entropy.detach(),
        "pg_clipfrac": reduce(pg_clipfrac).detach(),
        "ppo_kl": reduce(ppo_kl).detach(),
        **metrics,
    }


def _comparisons(batch: dict[str, Any], log_probs: LogProbs, reduce: Reducer) -> dict[str, Tensor]:
    """Return the metrics that compare the policy with its teacher and with the engines, where there are such."""
    metrics = {}
    if batch.get("opd_reverse_kl") is not None:
        metrics["opd_reverse_kl"] = reduce(flat(batch["opd_reverse_kl"]))
    if log_probs.rollout is not None:
        difference = (flat(log_probs.trainer) - flat(log_probs.rollout)).abs()
        metrics["train_rollout_logprob_abs_diff"] = reduce(difference).detach()
    return metrics


def _log_probs(args: Args, batch: dict[str, Any], current: Column) -> LogProbs:
    detached = [values.detach() for values in current]
    trainer = batch.get("log_probs") or detached
    rollout = batch.get("rollout_log_probs")
    masked_rollout = None if rollout is None else _mask_untrained(batch, rollout, fill=trainer)
    if args.use_rollout_logprobs:
        if rollout is None:
            raise ValueError(
                "--use-rollout-logprobs: the samples have no rollout_log_probs; the generate function must set them"
            )
        return LogProbs(current, trainer, masked_rollout, old=_mask_untrained(batch, rollout, fill=detached))
    old = trainer if trainer is detached else _mask_untrained(batch, trainer, fill=detached)
    return LogProbs(current, trainer, masked_rollout, old)


def _mask_untrained(batch: dict[str, Any], column: Column, *, fill: Column) -> RaggedTensor:
    """Return ``column`` with the values of ``fill`` at the tokens that are not trained.

    The column's own values there, such as placeholder log-probs of a tool's text, may make ``exp`` of a difference
    infinite. Masks are multiplied afterwards, and infinity times 0 is NaN.
    """
    masks = ResponseLayout.of(batch).local(batch["loss_masks"])
    return RaggedTensor(torch.where(masks.values != 0, flat(column), flat(fill)), masks.lengths)


def _ppo_kl(estimator: Estimator, layout: ResponseLayout, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    """old - current per local token; of sequences the masked mean over the whole response, for each of its tokens."""
    if estimator.ratio == "token":
        return flat(log_probs.old) - flat(log_probs.current)
    return compute_gspo_kl(
        full_log_probs=layout.whole(log_probs.current),
        full_old_log_probs=layout.whole(log_probs.old),
        local_log_probs=log_probs.current,
        loss_masks=batch["loss_masks"],
    )


def _off_policy_sequences(args: Args, layout: ResponseLayout, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    """OPSM: 0 for tokens with A < 0 of sequences whose mean(old - current) exceeds ``opsm_delta``, else 1."""
    keep, _ = compute_opsm_mask(
        args=args,
        full_log_probs=layout.whole(log_probs.current),
        full_old_log_probs=layout.whole(log_probs.old),
        advantages=batch["advantages"],
        loss_masks=batch["loss_masks"],
    )
    return keep


def _correct_importance(
    args: Args, batch: dict[str, Any], log_probs: LogProbs, pg_loss: Tensor
) -> tuple[Tensor, Column, dict[str, Tensor]]:
    if log_probs.rollout is None:
        raise ValueError(
            "--use-tis / --get-mismatch-metrics: the samples have no rollout_log_probs; the generate function must set "
            "them"
        )
    custom = optional_function(args, "custom_tis_function_path")
    columns = {
        "train_log_probs": log_probs.trainer,
        "rollout_log_probs": log_probs.rollout,
        "loss_masks": batch["loss_masks"],
    }
    lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
    if custom is None:
        return vanilla_tis_function(args, pg_loss=pg_loss, **columns, **lengths)
    result = custom(args=args, pg_loss=pg_loss, **{name: list(c) for name, c in columns.items()}, **lengths)
    return checked_correction(custom, result, pg_loss, batch["loss_masks"])


def _reducer(args: Args, layout: ResponseLayout, batch: dict[str, Any], masks: Column) -> Reducer:
    """The reducer with other masks as numerators; denominators stay those of the original masks."""
    sums = batch.get("rollout_mask_sums")
    if sums is None:
        sums = [mask.sum() for mask in batch["loss_masks"]]
    reduce = layout.reducer(masks, sums, per_token=args.calculate_per_token_loss)
    if isinstance(batch, LossBatch):
        tokens = torch.ones(sum(layout.local_lengths()), dtype=torch.float64, device=masks[0].device)
        batch.kept_weight = reduce(tokens)
    return reduce


def _pg_reducer(args: Args, layout: ResponseLayout, batch: dict[str, Any], masks: Column, default: Reducer) -> Reducer:
    if args.pg_loss_reducer == "constant_length":
        return constant_length(layout.local(masks), args.pg_loss_length)
    custom = optional_function(args, "custom_pg_loss_reducer_function_path")
    if custom is None:
        return default
    # by name alone: a function written for the four arguments may hide them behind **kwargs
    rollouts = {name: batch[name] for name in REDUCER_KEYWORDS if custom.has_parameter(name)}
    result = custom(
        layout.total_lengths, layout.response_lengths, list(masks), args.calculate_per_token_loss, **rollouts
    )
    return checked_reducer(custom, result)


def _turn_mean(layout: ResponseLayout, batch: dict[str, Any], masks: Column) -> Reducer:
    own = torch.stack([mask.sum() for mask in batch["loss_masks"]])
    return turn_mean(layout.local(masks), own, batch["rollout_turn_counts"])


def _kl_to_reference(args: Args, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    current = flat(log_probs.current)
    ratio = None
    if args.use_unbiased_kl:
        ratio = (current - flat(log_probs.old)).exp()
    reference = _mask_untrained(batch, batch["ref_log_probs"], fill=[values.detach() for values in log_probs.current])
    return compute_approx_kl(current, reference.values, args.kl_loss_type, ratio)
