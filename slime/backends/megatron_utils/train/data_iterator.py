"""Micro-batches for schedules of a user's own, in the form of slime <= 0.3.1; the trainer's own are in ``data``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from slime.arguments.args import Args
from slime.backends.megatron_utils.train.data import LossBatch, RolloutData, pack_tokens


class DataIterator:
    """Walks over the columns of ``rollout_data``: by ``micro_batch_indices``, or ``micro_batch_size`` samples each."""

    def __init__(
        self,
        rollout_data: Mapping[str, Any],
        micro_batch_size: int | None = None,
        micro_batch_indices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if (micro_batch_size is None) == (micro_batch_indices is None):
            raise ValueError("DataIterator takes one of micro_batch_size and micro_batch_indices")
        self.rollout_data = rollout_data
        self.micro_batch_size = micro_batch_size
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """Return the next micro-batch's entries of the columns ``keys``, None for those that are not there.

        Raises IndexError after the last one.
        """
        indices = self._next_indices()
        columns = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if column is None else [column[i] for i in indices] for key, column in columns.items()}

    def reset(self) -> Self:
        """Begin again."""
        self.offset = 0
        return self

    def _next_indices(self) -> Sequence[int]:
        if self.micro_batch_indices is not None:
            self.offset += 1
            return self.micro_batch_indices[self.offset - 1]
        assert self.micro_batch_size is not None
        start, self.offset = self.offset, self.offset + self.micro_batch_size
        if self.offset > len(self.rollout_data["tokens"]):
            raise IndexError(f"micro-batch of samples {start} to {self.offset - 1}: there are fewer samples")
        return range(start, self.offset)


def get_data_iterator(
    args: Args, model: Sequence[Any], rollout_data: RolloutData
) -> tuple[list[DataIterator], list[int]]:
    """Return an iterator over the schedule of ``rollout_data`` per model chunk, and the micro-batches of each step."""
    del args  # the schedule was made where the data was divided over the ranks
    iterators = [DataIterator(rollout_data, micro_batch_indices=rollout_data["micro_batch_indices"]) for _ in model]
    return iterators, list(rollout_data["num_microbatches"])


def get_batch(
    data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int = 128, qkv_format: str = "thd"
) -> dict[str, Any]:
    """Return the next micro-batch: the columns ``keys`` and the packed stream, as ``data.build_micro_batch`` makes it.

    ``keys`` must have ``tokens``; lengths are added. Raises ValueError for a ``qkv_format`` other than ``thd``.
    """
    if qkv_format != "thd":
        raise ValueError(f"qkv_format={qkv_format!r}: expected 'thd'; samples are packed one after the other")
    wanted = dict.fromkeys([*keys, "tokens", "total_lengths", "response_lengths"])
    batch = LossBatch(data_iterator.get_next(list(wanted)))
    pack_tokens(batch, pad_multiplier)
    return batch
