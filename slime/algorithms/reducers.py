"""From one number per token to the loss: how samples and tokens weigh.

The denominators are of the whole rollout, not of the micro-batch, so sums over micro-batches, ranks and
context-parallel slices give the loss of the whole step for any division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.algorithms.trained_tokens import where_trained

Reducer = Callable[[Tensor], Tensor]
"""Per-token values [R] of all samples of a micro-batch, one after the other -> scalar."""


def rollout_mean(loss_masks: Sequence[Tensor], rollout_mask_sums: Sequence[float] | Tensor) -> Reducer:
    """Reduce by ``sum_i sum_t x_it mask_it / max(rollout_mask_sum_i, 1)``: every rollout weighs the same.

    loss_masks: [n_i] per sample, for the tokens that will be passed (a rank's slice under context parallelism).
    rollout_mask_sums: per sample, trained tokens of its whole rollout, siblings included.
    """
    device = loss_masks[0].device
    sums = torch.as_tensor(rollout_mask_sums, device=device).clamp_min(1)
    sizes = torch.tensor([mask.size(0) for mask in loss_masks], device=device)
    # output_size spares a GPU the wait for the sizes
    denominators = sums.repeat_interleave(sizes, output_size=sum(mask.size(0) for mask in loss_masks))
    return _weighted_sum(torch.cat(list(loss_masks)), denominators)


def turn_mean(
    loss_masks: Sequence[Tensor], mask_sums: Sequence[float] | Tensor, turn_counts: Sequence[int] | Tensor
) -> Reducer:
    """Reduce by ``sum_i sum_t x_it mask_it / (turns_i max(mask_sum_i, 1))``: the turns of a rollout weigh the same.

    That is the sum over rollouts of the mean over their samples of the mean over tokens (Flow-GRPO, arXiv:2510.05592).

    loss_masks: as in ``rollout_mean``. mask_sums: per sample, its own trained tokens. turn_counts: per sample, how many
    samples of its whole rollout have a trained token.
    """
    device = loss_masks[0].device
    turns = torch.as_tensor(turn_counts, device=device).clamp_min(1)
    return rollout_mean(loss_masks, torch.as_tensor(mask_sums, device=device).clamp_min(1) * turns)


def constant_length(loss_masks: Sequence[Tensor], length: float) -> Reducer:
    """Reduce by ``sum_i sum_t x_it mask_it / length``: every token weighs the same (Dr. GRPO, arXiv:2503.20783).

    Without the division by a response's own length long wrong answers are not favored. ``length`` is the same for the
    whole run, usually the longest response allowed. Raises ValueError unless it is positive.
    """
    if not length > 0:
        raise ValueError(f"--pg-loss-length must be positive, got {length}")
    return _weighted_sum(torch.cat(list(loss_masks)), float(length))


def token_sum(loss_masks: Sequence[Tensor]) -> Reducer:
    """Reduce by ``sum_i sum_t x_it mask_it``; the caller divides by the number of trained tokens of the step."""
    return _weighted_sum(torch.cat(list(loss_masks)), None)


def make_reducer(
    loss_masks: Sequence[Tensor],
    rollout_mask_sums: Sequence[float] | Tensor | None = None,
    *,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """Return ``token_sum`` or ``rollout_mean``; without ``rollout_mask_sums`` every sample weighs by its own mask.

    Own masks are the given ones, so without ``rollout_mask_sums`` they must be whole, not a rank's slice.
    """
    if calculate_per_token_loss:
        return token_sum(loss_masks)
    if rollout_mask_sums is None:
        rollout_mask_sums = [float(mask.sum()) for mask in loss_masks]
    return rollout_mean(loss_masks, rollout_mask_sums)


def num_trained_tokens(loss_masks: Sequence[Tensor]) -> Tensor:
    """Return the normalizer of the per-token loss, ``sum_i sum_t mask_it``, an int64 scalar tensor."""
    return torch.stack([mask.sum() for mask in loss_masks]).sum().long()


def _weighted_sum(mask: Tensor, denominators: Tensor | float | None) -> Reducer:
    def reduce(values: Tensor) -> Tensor:
        if values.shape != mask.shape:
            raise ValueError(f"expected one value per token {tuple(mask.shape)}, got {tuple(values.shape)}")
        weighted = where_trained(mask, values) * mask
        return (weighted if denominators is None else weighted / denominators).sum()

    return reduce
