"""Losses of the trainer and advantages under their public names; importable without Megatron.

A ``batch`` has per-sample columns (see ``data``): ``unconcat_tokens``, ``total_lengths``, ``response_lengths``,
``loss_masks`` (whole), ``rollout_mask_sums``, and as far as they exist the per-token columns ``advantages``,
``log_probs``, ``ref_log_probs``, ``rollout_log_probs`` for the response tokens whose logits this rank holds ("local",
see ``cp_utils``). The mathematics is in ``slime.algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.advantages import EstimatorInputs, distill
from slime.algorithms.estimators import estimator_of
from slime.algorithms.kl import compute_approx_kl
from slime.algorithms.reducers import num_trained_tokens
from slime.algorithms.rewards import leave_one_out
from slime.algorithms.trained_tokens import finite_elsewhere
from slime.algorithms.whitening import masked_whiten
from slime.arguments.args import Args
from slime.backends.megatron_utils.model.mtp_loss import add_mtp_loss
from slime.backends.megatron_utils.state.parallel import (
    all_gather_objects,
    context_parallel,
    data_parallel,
    is_last_stage,
)
from slime.backends.megatron_utils.train.cp_utils import Reducer, ResponseLayout
from slime.backends.megatron_utils.train.data import LossBatch, RolloutData, may_overwrite_logits
from slime.backends.megatron_utils.train.hooks import check_token_columns, checked_loss, optional_function
from slime.backends.megatron_utils.train.importance import icepop_function, mis_function, vanilla_tis_function
from slime.backends.megatron_utils.train.mismatch import note_mismatch
from slime.backends.megatron_utils.train.policy_loss import policy_loss_function
from slime.backends.megatron_utils.train.response_logits import (
    get_log_probs_and_entropy,
    get_responses,
    get_rollout_top_p_logprob_kwargs,
    note_finite_samples,
)
from slime.backends.megatron_utils.train.values import get_values, value_loss_function
from slime.batching.ragged_tensor import as_lists, flat
from slime.utils.declared import with_defaults
from slime.utils.misc import load_function

__all__ = [
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_rollout_top_p_logprob_kwargs",
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
    """Results of a micro-batch's loss.

    keys: names of the metrics. values: float32 [1 + keys], the token count and then the metrics, reduced as the loss.
    weight: what the tokens weigh together in that reduction, a float64 scalar: those of a whole step are as many as the
    trajectories that have a trained token, or as the trained tokens. kept_weight: the same of the tokens that an
    importance correction has left.
    finite: bool, whether the loss is. finite_samples: bool [samples], and mismatch: [samples, 5], where known.
    """

    keys: list[str]
    values: Tensor
    weight: Tensor
    kept_weight: Tensor
    finite: Tensor
    finite_samples: Tensor | None
    mismatch: Tensor | None


LossFunction = Callable[[Args, dict[str, Any], Tensor, Reducer], tuple[Tensor, dict[str, Tensor]]]


def sft_loss_function(
    args: Args, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (negative log-likelihood of the trained response tokens, {"loss"}), reduced by ``sum_of_sample_mean``."""
    args = with_defaults(args)
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


def _loss_by_type(args: Args) -> LossFunction:
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
    args: Args, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, LossReport] | tuple[Tensor, Tensor, LossReport]:
    """Return what Megatron's schedules expect of a micro-batch, scaled so that gradients do not depend on the layout.

    With B the step's ``batch["global_batch_size"]`` and S the reduced loss of the micro-batch, the gradient that
    reaches the optimizer is that of ``sum(S) / B`` over all micro-batches of all ranks: the schedule multiplies the
    first of two values by cp / num_microbatches and DDP divides by dp * cp, hence the factor here. With
    ``calculate_per_token_loss`` it is ``sum(S) / tokens``: three values, of which the schedule leaves the loss alone,
    and Megatron divides gradients by the token count that it sums over DP x CP, where each CP rank reports all tokens.

    The last value is the ``LossReport``.
    """
    args = with_defaults(args)
    if not isinstance(batch, LossBatch):
        batch = LossBatch(batch)
    per_token = args.calculate_per_token_loss
    masks, layout = batch["loss_masks"], ResponseLayout.of(batch)
    num_tokens = num_trained_tokens(masks).int()
    reduce = layout.reducer(masks, batch.get("rollout_mask_sums"), per_token=per_token)
    function = _loss_by_type(args)
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, reduce, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, reduce)
    loss, metrics = add_mtp_loss(args, batch.mtp_targets, loss, metrics)

    mismatch = None if args.loss_type in ("sft_loss", "value_loss") else note_mismatch(batch)
    values = [num_tokens, *metrics.values()]
    weight = reduce(torch.ones_like(layout.local(masks).values, dtype=torch.float64))
    report: LossReport = {
        "keys": list(metrics),
        "values": torch.stack([torch.as_tensor(v, device=logits.device).detach().float().reshape(()) for v in values]),
        "weight": weight,
        "kept_weight": weight if batch.kept_weight is None else batch.kept_weight,
        "finite": torch.isfinite(loss.detach()).all(),  # metrics need not be: a mean over nothing, say
        "finite_samples": batch.finite_samples,
        "mismatch": mismatch,
    }
    if per_token:
        return loss * context_parallel().size, num_tokens, report
    scale = num_microbatches * data_parallel().size / batch["global_batch_size"]
    return loss * scale, report


def add_distillation(args: Args, data: RolloutData) -> None:
    """With ``--use-opd``: take ``opd_kl_coef`` times the reverse KL off ``advantages``, and set ``opd_reverse_kl``.

    The student's log-probs are those of the old policy. Returns of a value function stay as they are: it does not know
    the teacher. Raises ValueError when a column is missing.
    """
    if not args.use_opd:
        return
    student = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    if data.get("teacher_log_probs") is None:
        raise ValueError(
            f"--use-opd --opd-type {args.opd_type}: the samples have no teacher_log_probs. "
            "slime.rollout.on_policy_distillation sets them (--custom-rm-path ...reward_func, "
            "--custom-reward-post-process-path ...post_process_rewards), or set Sample.teacher_log_probs, one number "
            "per response token, in a function of yours; a converter of yours must pass the column on"
        )
    if data.get(student) is None:
        raise ValueError(f"--use-opd needs the student's {student}, which the samples and passes do not have")
    found = distill(data["advantages"], data[student], data["teacher_log_probs"], args.opd_kl_coef)
    masks = ResponseLayout.of(data).local(data["loss_masks"])
    data["advantages"], data["opd_reverse_kl"] = (finite_elsewhere(masks, column) for column in found)


Column = list[Tensor]


def compute_advantages_and_returns(args: Args, rollout_data: dict) -> None:
    """Set ``kl``, ``advantages`` and ``returns`` in ``rollout_data``: lists of local tensors [n_local], one per sample.

    ``kl`` is that of the policy to the reference (zeros with ``kl_coef`` 0). ``--custom-advantage-function-path``
    replaces the estimator; distillation (``use_opd``) and then whitening (``normalize_advantages``, over DP x CP,
    returns untouched) apply to it too.
    No-op but on the last pipeline stage. Raises ValueError for an unknown estimator and for missing columns.
    """
    args = with_defaults(args)
    if not is_last_stage():
        return
    layout = ResponseLayout.of(rollout_data)
    rollout_data["kl"] = _kl(args, rollout_data, layout)
    custom = optional_function(args, "custom_advantage_function_path")
    if custom is not None:
        as_lists(rollout_data)
        custom(args, rollout_data)
        missing = [key for key in ("advantages", "returns") if key not in rollout_data]
        if missing:
            raise ValueError(f"{custom} did not set {missing}: lists with one tensor per sample")
        check_token_columns(custom, rollout_data, ["advantages", "returns"])
    else:
        advantages, returns = _estimate(args, rollout_data, layout)
        rollout_data["advantages"], rollout_data["returns"] = advantages, returns
    add_distillation(args, rollout_data)
    if args.normalize_advantages:
        rollout_data["advantages"] = _whiten(rollout_data, layout)


def _kl(args: Args, data: dict, layout: ResponseLayout) -> Column:
    masks = layout.local(data["loss_masks"])
    if args.kl_coef == 0:
        return [torch.zeros(mask.shape, dtype=torch.float32, device=mask.device) for mask in masks]
    policy = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    for key in (policy, "ref_log_probs"):
        if data.get(key) is None:
            raise ValueError(f"--kl-coef {args.kl_coef} needs {key}, which the samples and passes do not have")
    pairs = zip(data[policy], data["ref_log_probs"], strict=True)
    kl = [compute_approx_kl(log_probs, ref, args.kl_loss_type) for log_probs, ref in pairs]
    return finite_elsewhere(masks, kl)


def _estimate(args: Args, data: dict, layout: ResponseLayout) -> tuple[Column, Column]:
    """Return (advantages, returns) of the table's entry."""
    estimator = estimator_of(args)
    if estimator.needs_critic and "values" not in data:
        raise ValueError(f"--advantage-estimator {estimator.name} needs the critic's values")
    penalized = estimator.kl == "response" and args.kl_coef != 0
    inputs = EstimatorInputs(
        rewards=data["rewards"],
        kl=data["kl"],
        loss_masks=data["loss_masks"],
        layout=layout,
        values=data["values"] if estimator.needs_critic else (),
        response_kl=_leave_one_out_kl(args, data, layout) if penalized else [0.0] * len(data["kl"]),
    )
    return load_function(estimator.advantages)(args, inputs)


def _leave_one_out_kl(args: Args, data: dict, layout: ResponseLayout) -> list[float]:
    """Return the KL of each response minus the mean over its group's other trajectories, on any ranks.

    The KL itself where there is none: carried over into a step without the rest of its group it is penalized too.
    """
    groups = data.get("group_indices")
    if groups is None or any(group is None for group in groups):
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator} with --kl-coef compares the KL of the answers to a "
            "prompt and needs the group_index of every sample: set it in the rollout function, and group_indices in a "
            "converter (--custom-convert-samples-to-train-data-path)"
        )
    kl = layout.whole(data["kl"])
    sums = [float((k * mask).sum()) for k, mask in zip(kl, data["loss_masks"], strict=True)]
    ranks = data_parallel()
    mine = list(zip(sums, groups, data["rollout_ids"], strict=True))
    parts = all_gather_objects(mine, ranks)
    rows = [row for part in parts for row in part]
    trajectories: dict[int, set[int]] = {}
    for _, group, rollout_id in rows:
        trajectories.setdefault(group, set()).add(rollout_id)
    centered = [
        value if len(trajectories[group]) > 1 else penalty
        for value, (penalty, group, _) in zip(leave_one_out(*zip(*rows, strict=True)), rows, strict=True)
    ]
    start = sum(len(part) for part in parts[: ranks.rank])
    return centered[start : start + len(mine)]


def _whiten(data: dict, layout: ResponseLayout) -> Column:
    mask = layout.local(data["loss_masks"])
    group = data_parallel(with_context_parallel=True).group
    whitened = masked_whiten(flat(data["advantages"]), mask.values, group=group)
    return list(whitened.split([values.size(0) for values in data["advantages"]]))
