"""Responses closed up to their trained tokens.

What an environment or a tool wrote is no action of the policy: all that runs along a response, such as discounts,
advantage estimation and penalties, steps from one trained token (loss mask not 0) to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TrainedTokens:
    """The positions of the trained tokens of whole responses. ``lengths``: how many each response has."""

    def __init__(self, loss_masks: Sequence[Tensor]) -> None:
        self._sizes = [mask.size(0) for mask in loss_masks]
        self.lengths: list[int] = torch.stack([mask.count_nonzero() for mask in loss_masks]).tolist()
        every = self.lengths == self._sizes
        self._positions = None if every else torch.cat(list(loss_masks)).nonzero().flatten()

    def close_up(self, column: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of the trained tokens alone, [lengths_i], of a column of whole responses."""
        if self._positions is None:
            return list(column)
        return list(torch.cat(list(column)).index_select(0, self._positions).split(self.lengths))

    def spread(self, column: Sequence[Tensor]) -> list[Tensor]:
        """Return whole responses from a column of trained tokens alone, with 0 at the others."""
        if self._positions is None:
            return list(column)
        values = torch.cat(list(column))
        return list(values.new_zeros(sum(self._sizes)).index_copy_(0, self._positions, values).split(self._sizes))


def where_trained(mask: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` with 0 at the tokens that are not trained: infinity or NaN times a mask of 0 would be NaN."""
    return torch.where(mask != 0, values, 0)


def finite_elsewhere(masks: Sequence[Tensor], column: Sequence[Tensor]) -> list[Tensor]:
    """Return ``column`` with 0 in place of what is not finite at tokens that are not trained.

    Their log-probs may be placeholders, so that a difference of two of them is infinite or NaN.
    """
    pairs = zip(masks, column, strict=True)
    return [torch.where((mask != 0) | values.isfinite(), values, 0) for mask, values in pairs]
