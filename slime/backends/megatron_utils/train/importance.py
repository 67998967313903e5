"""Importance corrections between engine and trainer with the signature of ``--custom-tis-function-path``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from slime.algorithms.mis import ImportanceWeights, compute_mis_weights, icepop_weights, truncated_importance_weights
from slime.arguments.args import Args
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.batching.ragged_tensor import flat
from slime.utils.declared import with_defaults

Corrected = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]


def vanilla_tis_function(
    args: Args,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: object,
) -> Corrected:
    """Multiply ``pg_loss`` [n] by ``clamp(p_train / p_rollout, tis_clip_low, tis_clip)`` per token.

    ``*_log_probs``: local tensors per sample, n values together. Returns (loss [n], the masks as they came, per-token
    metrics ``tis`` (the ratio), ``tis_clipfrac``, ``tis_abs``).
    """
    del kwargs
    args = with_defaults(args)
    return _corrected(args, truncated_importance_weights, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Args,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: object,
) -> Corrected:
    """As ``vanilla_tis_function`` with IcePop's weights: the ratio within the bounds, 0 outside of them."""
    del kwargs
    args = with_defaults(args)
    return _corrected(args, icepop_weights, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def mis_function(
    args: Args,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: object,
) -> Corrected:
    """Weights by token, sequence or geometric mean, rejection and veto; ``slime.algorithms.mis`` has the formulas.

    ``*_log_probs`` are this context-parallel rank's parts, n values together; ratios of sequences are of whole ones.
    Returns (``pg_loss`` [n] times the weights, masks of whole responses, per-token metrics [n]).
    """
    del kwargs
    args = with_defaults(args)

    layout = ResponseLayout(total_lengths, response_lengths)
    train, rollout = (
        layout.whole([values.detach() for values in column]) for column in (train_log_probs, rollout_log_probs)
    )
    weights, masks, metrics = compute_mis_weights(
        args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=loss_masks
    )
    if args.use_tis:
        pg_loss = pg_loss * layout.local(weights).values
    return pg_loss, masks, {name: layout.local(values).values for name, values in metrics.items()}


def _corrected(
    args: Args,
    weigh: Callable[[Tensor, Tensor, float, float], ImportanceWeights],
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Corrected:
    train, rollout = flat(train_log_probs), flat(rollout_log_probs)
    result = weigh(train, rollout, args.tis_clip_low, args.tis_clip)
    metrics = {"tis": result.ratio, "tis_clipfrac": result.clipped, "tis_abs": result.deviation}
    return pg_loss * result.weights, loss_masks, metrics
