"""Losses of the trainer under their public names, over packed logits; importable without Megatron.

A ``batch`` has per-sample columns (see ``data``): ``unconcat_tokens``, ``total_lengths``, ``response_lengths``,
``loss_masks`` (whole), ``rollout_mask_sums``, and as far as they exist the per-token columns ``advantages``,
``log_probs``, ``ref_log_probs``, ``rollout_log_probs`` for the response tokens whose logits this rank holds ("local",
see ``cp_utils``). The mathematics is in ``slime.algorithms``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.reducers import num_trained_tokens
from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.cp_utils import Reducer, get_sum_of_sample_mean
from slime.backends.megatron_utils.data import LossBatch, may_overwrite_logits
from slime.backends.megatron_utils.hooks import checked_loss, optional_function
from slime.backends.megatron_utils.importance import icepop_function, mis_function, vanilla_tis_function
from slime.backends.megatron_utils.mismatch import note_mismatch
from slime.backends.megatron_utils.mtp_loss import add_mtp_loss
from slime.backends.megatron_utils.parallel import context_parallel, data_parallel
from slime.backends.megatron_utils.policy_loss import policy_loss_function
from slime.backends.megatron_utils.response_logits import (
    get_log_probs_and_entropy,
    get_responses,
    note_finite_samples,
)
from slime.backends.megatron_utils.values import get_values, value_loss_function

__all__ = [
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_values",
    "icepop_function",
    "loss_function",
    "mis_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]


class LossReport(TypedDict):
    """What is known of a micro-batch after its loss.

    keys: names of the metrics. values: float32 [1 + keys], the token count and then the metrics, reduced as the loss.
    finite: bool, whether the loss is. finite_samples: bool [samples], and mismatch: [samples, 5], where known.
    """

    keys: list[str]
    values: Tensor
    finite: Tensor
    finite_samples: Tensor | None
    mismatch: Tensor | None


LossFunction = Callable[[Namespace, dict[str, Any], Tensor, Reducer], tuple[Tensor, dict[str, Tensor]]]


def sft_loss_function(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (negative log-likelihood of the trained response tokens, {"loss"}), reduced by ``sum_of_sample_mean``."""
    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        overwrite_logits=may_overwrite_logits(args, batch),
    )
    note_finite_samples(batch, result["log_probs"])
    loss = -sum_of_sample_mean(torch.cat(result["log_probs"]))
    return loss, {"loss": loss.detach()}


def _loss_by_type(args: Namespace) -> LossFunction:
    if args.loss_type == "policy_loss":
        return policy_loss_function
    if args.loss_type == "sft_loss":
        return sft_loss_function
    if args.loss_type == "custom_loss":
        custom = optional_function(args, "custom_loss_function_path")
        if custom is None:
            raise ValueError("--loss-type custom_loss needs --custom-loss-function-path")
        return lambda *inputs: checked_loss(custom, custom(*inputs))
    if args.loss_type == "value_loss":  # of a critic's arguments, see slime.arguments.rules.roles
        return value_loss_function
    raise ValueError(f"--loss-type {args.loss_type}: expected policy_loss, sft_loss or custom_loss")


def loss_function(
    args: Namespace, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, LossReport] | tuple[Tensor, Tensor, LossReport]:
    """Return what Megatron's schedules expect of a micro-batch, scaled so that gradients do not depend on the layout.

    With B the step's ``batch["global_batch_size"]`` and S the reduced loss of the micro-batch, the gradient that
    reaches the optimizer is that of ``sum(S) / B`` over all micro-batches of all ranks: the schedule multiplies the
    first of two values by cp / num_microbatches and DDP divides by dp * cp, hence the factor here. With
    ``calculate_per_token_loss`` it is ``sum(S) / tokens``: three values, of which the schedule leaves the loss alone,
    and Megatron divides gradients by the token count that it sums over DP x CP, where each CP rank reports all tokens.

    The last value is the ``LossReport``.
    """
    if not isinstance(batch, LossBatch):
        batch = LossBatch(batch)
    per_token = args.calculate_per_token_loss
    masks = batch["loss_masks"]
    num_tokens = num_trained_tokens(masks).int()
    reduce = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        masks,
        per_token,
        sample_denoms=batch.get("rollout_mask_sums"),
    )
    function = _loss_by_type(args)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reduce, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reduce)
    loss, metrics = add_mtp_loss(args, batch.mtp_targets, loss, metrics)

    mismatch = None if args.loss_type in ("sft_loss", "value_loss") else note_mismatch(batch)
    values = [num_tokens, *metrics.values()]
    report: LossReport = {
        "keys": list(metrics),
        "values": torch.stack([torch.as_tensor(v, device=logits.device).detach().float().reshape(()) for v in values]),
        "finite": torch.isfinite(loss.detach()).all(),  # metrics need not be: a mean over nothing, say
        "finite_samples": batch.finite_samples,
        "mismatch": mismatch,
    }
    if per_token:
        return loss * context_parallel().size, num_tokens, report
    scale = num_microbatches * data_parallel().size / batch["global_batch_size"]
    return loss * scale, report
