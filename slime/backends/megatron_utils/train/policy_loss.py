"""The policy-gradient loss of one micro-batch: PPO-clip and its variants, importance correction, KL, entropy."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.losses import compute_cispo_loss, compute_gspo_kl, compute_opsm_mask, compute_policy_loss
from slime.algorithms.reducers import constant_length, turn_mean
from slime.algorithms.trained_tokens import finite_elsewhere
from slime.backends.megatron_utils.train.cp_utils import (
    Reducer,
    all_gather_samples_with_cp,
    get_sum_of_sample_mean,
    slice_samples_with_cp,
)
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
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
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
    current = flat(log_probs.current)
    trained = _local_masks(batch, batch["loss_masks"]).values
    [advantages] = finite_elsewhere([trained], [flat(batch["advantages"])])

    ppo_kl = _ppo_kl(args, batch, log_probs)
    if args.advantage_estimator == "cispo":
        pg_loss, pg_clipfrac = compute_cispo_loss(ppo_kl, current, advantages, args.eps_clip, args.eps_clip_high)
    else:
        clip_c = args.eps_clip_c
        pg_loss, pg_clipfrac = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, clip_c)
    metrics: dict[str, Tensor] = {}
    if args.use_opsm:
        keep = _off_policy_sequences(args, batch, log_probs)
        pg_loss, metrics["opsm_clipfrac"] = pg_loss * keep, sum_of_sample_mean(1 - keep)

    reduce, masks = sum_of_sample_mean, batch["loss_masks"]
    if args.use_tis or args.get_mismatch_metrics:
        ois = (-ppo_kl).exp().detach()
        pg_loss, masks, tis_metrics = _correct_importance(args, batch, log_probs, pg_loss)
        # The correction's own metrics are means over the tokens that were trained before it masked any.
        metrics["ois"] = sum_of_sample_mean(ois)
        metrics.update({name: sum_of_sample_mean(values) for name, values in tis_metrics.items()})
        if masks is not batch["loss_masks"]:
            reduce = _reducer(args, batch, masks)
            if isinstance(batch, LossBatch):
                batch.kept_weight = reduce(torch.ones_like(ois, dtype=torch.float64))

    # of what the loss is made of; metrics weigh as they do in other runs
    terms = _turn_mean(batch, masks) if args.pg_loss_reducer == "turn_mean" else reduce
    loss = pg = _pg_reducer(args, batch, masks, terms)(pg_loss)
    entropy = terms(torch.cat(result["entropy"]))
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * entropy
    if args.use_kl_loss:
        kl = terms(_kl_to_reference(args, batch, log_probs))
        loss = loss + args.kl_loss_coef * kl
        metrics["kl_loss"] = kl.detach()
    if batch.get("opd_reverse_kl") is not None:
        metrics["opd_reverse_kl"] = reduce(flat(batch["opd_reverse_kl"]))
    if log_probs.rollout is not None:
        difference = (flat(log_probs.trainer) - flat(log_probs.rollout)).abs()
        metrics["train_rollout_logprob_abs_diff"] = reduce(difference).detach()
    return loss, {
        "loss": loss.detach(),
        "pg_loss": pg.detach(),
        "entropy_loss": entropy.detach(),
        "pg_clipfrac": reduce(pg_clipfrac).detach(),
        "ppo_kl": reduce(ppo_kl).detach(),
        **metrics,
    }


def _log_probs(args: Namespace, batch: dict[str, Any], current: Column) -> LogProbs:
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
    masks = _local_masks(batch, batch["loss_masks"])
    return RaggedTensor(torch.where(masks.values != 0, flat(column), flat(fill)), masks.lengths)


def _whole(batch: dict[str, Any], column: Column) -> list[Tensor]:
    return all_gather_samples_with_cp(column, batch["total_lengths"], batch["response_lengths"])


def _ppo_kl(args: Namespace, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    """old - current per local token; with GSPO the masked mean over the whole response, for each of its tokens."""
    if args.advantage_estimator != "gspo":
        return flat(log_probs.old) - flat(log_probs.current)
    return compute_gspo_kl(
        full_log_probs=_whole(batch, log_probs.current),
        full_old_log_probs=_whole(batch, log_probs.old),
        local_log_probs=log_probs.current,
        loss_masks=batch["loss_masks"],
    )


def _off_policy_sequences(args: Namespace, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    """OPSM: 0 for tokens with A < 0 of sequences whose mean(old - current) exceeds ``opsm_delta``, else 1."""
    keep, _ = compute_opsm_mask(
        args=args,
        full_log_probs=_whole(batch, log_probs.current),
        full_old_log_probs=_whole(batch, log_probs.old),
        advantages=batch["advantages"],
        loss_masks=batch["loss_masks"],
    )
    return keep


def _correct_importance(
    args: Namespace, batch: dict[str, Any], log_probs: LogProbs, pg_loss: Tensor
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


def _reducer(args: Namespace, batch: dict[str, Any], masks: Column) -> Reducer:
    """The reducer with other masks as numerators; denominators stay those of the original masks."""
    sums = batch.get("rollout_mask_sums")
    if sums is None:
        sums = [mask.sum() for mask in batch["loss_masks"]]
    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        masks,
        args.calculate_per_token_loss,
        sample_denoms=sums,
    )


def _pg_reducer(args: Namespace, batch: dict[str, Any], masks: Column, default: Reducer) -> Reducer:
    if args.pg_loss_reducer == "constant_length":
        return constant_length(_local_masks(batch, masks), args.pg_loss_length)
    custom = optional_function(args, "custom_pg_loss_reducer_function_path")
    if custom is None:
        return default
    # by name alone: a function written for the four arguments may hide them behind **kwargs
    rollouts = {name: batch[name] for name in REDUCER_KEYWORDS if custom.has_parameter(name)}
    lengths = (batch["total_lengths"], batch["response_lengths"])
    result = custom(*lengths, list(masks), args.calculate_per_token_loss, **rollouts)
    return checked_reducer(custom, result)


def _turn_mean(batch: dict[str, Any], masks: Column) -> Reducer:
    own = torch.stack([mask.sum() for mask in batch["loss_masks"]])
    return turn_mean(_local_masks(batch, masks), own, batch["rollout_turn_counts"])


def _local_masks(batch: dict[str, Any], masks: Column) -> RaggedTensor:
    return slice_samples_with_cp(masks, batch["total_lengths"], batch["response_lengths"])


def _kl_to_reference(args: Namespace, batch: dict[str, Any], log_probs: LogProbs) -> Tensor:
    current = flat(log_probs.current)
    ratio = None
    if args.use_unbiased_kl:
        ratio = (current - flat(log_probs.old)).exp()
    reference = _mask_untrained(batch, batch["ref_log_probs"], fill=[values.detach() for values in log_probs.current])
    return compute_approx_kl(current, reference.values, args.kl_loss_type, ratio)
