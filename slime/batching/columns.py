"""Rollout data by column: what the rollout manager packs once and every data-parallel rank maps without a copy.

Per-token fields are one contiguous array each plus offsets, numbers per sample one array each. Pickled with protocol 5
(as Ray does) the arrays travel out of band: the receiver's arrays are read-only views of the shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from slime.batching import validate
from slime.batching.errors import TrainDataError
from slime.batching.ragged import Ragged, ragged_from_rows
from slime.batching.schedule import DpSchedule

if TYPE_CHECKING:
    import torch

RAGGED_FIELDS: dict[str, str | None] = {
    "tokens": "int32",
    "loss_masks": "int8",
    "rollout_log_probs": "float32",
    "teacher_log_probs": "float32",
    "rollout_top_p_token_ids": "int32",
    "rollout_top_p_token_offsets": "int32",
    "rollout_routed_experts": None,
}
"""Per-token fields and their dtypes in the columns; None keeps the dtype of the data."""

NUMBER_FIELDS: dict[str, str] = {
    "response_lengths": "int64",
    "rewards": "float64",
    "truncated": "int8",
    "sample_indices": "int64",
    "rollout_ids": "int64",
    "rollout_mask_sums": "float32",
    "rollout_turn_counts": "int32",
}
"""Fields with one number per sample."""

OBJECT_FIELDS = ("multimodal_train_inputs", "metadata", "round_number", "source_names", "prompt", "group_indices")
"""Fields with any one object per sample."""

WHOLE_FIELDS = ("raw_reward", "total_lengths")
"""Fields every rank gets for the whole batch."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RolloutColumns:
    """All samples of one rollout (n of them), in columns.

    ragged: per-token fields of RAGGED_FIELDS. numbers: arrays [n] of NUMBER_FIELDS. objects: any other per-sample
    field, as lists of n Python objects. raw_reward: what the reward function gave, as it came, or None.
    """

    ragged: dict[str, Ragged]
    numbers: dict[str, np.ndarray]
    objects: dict[str, list[Any]]
    raw_reward: Any = None

    def __len__(self) -> int:
        return len(self.ragged["tokens"])

    @property
    def total_lengths(self) -> np.ndarray:
        """int64 [n], prompt + response tokens."""
        return self.ragged["tokens"].lengths

    @property
    def rollout_ids(self) -> list[int]:
        """The trajectory of every sample (``Sample.rollout_id``), for ``build_dp_schedule(rollout_indices=...)``."""
        return [int(rollout_id) for rollout_id in self.numbers["rollout_ids"]]

    @classmethod
    def from_train_data(cls, data: Mapping[str, Any]) -> RolloutColumns:
        """Pack a dict of per-sample lists: the built-in converter's or a custom one's.

        Required: ``tokens``, ``response_lengths``, ``rewards``, ``loss_masks``. ``rollout_ids`` may be absent or hold
        None (every such sample is a separate trajectory). Without ``rollout_mask_sums`` every sample weighs by its
        own mask, also among samples that share a rollout id; without ``rollout_turn_counts`` the samples with a trained
        token are counted by rollout id. Keys this package does not know are carried along when
        they hold one entry per sample, and left out with a warning when they do not.

        Raises TrainDataError, naming the sample, for lengths that disagree, values that are not finite and ids that do
        not fit.
        """
        validate.required_keys(data)
        count = len(data["tokens"])
        name_of = validate.sample_namer(data.get("sample_indices"))
        fields = {key: value for key, value in data.items() if key not in WHOLE_FIELDS and value is not None}
        for key in fields.keys() - {*RAGGED_FIELDS, *NUMBER_FIELDS, *OBJECT_FIELDS}:
            if not validate.has_entries(fields[key], count):
                logger.warning("train data field %r is left out: it does not hold one entry per sample", key)
                del fields[key]
        validate.one_entry_per_sample(fields, count)

        ragged = {
            key: ragged_from_rows(fields.pop(key), dtype, key, name_of)
            for key, dtype in RAGGED_FIELDS.items()
            if key in fields
        }
        fields["rollout_ids"] = fill_rollout_ids(fields.get("rollout_ids", [None] * count))
        numbers = {
            key: validate.number_column(fields.pop(key), dtype, key, name_of)
            for key, dtype in NUMBER_FIELDS.items()
            if key in fields and not (key == "sample_indices" and any(index is None for index in fields[key]))
        }
        if "rollout_mask_sums" not in numbers:
            numbers["rollout_mask_sums"] = ragged["loss_masks"].row_sums().astype(np.float32)
        if "rollout_turn_counts" not in numbers:
            trained = ragged["loss_masks"].row_sums() > 0
            _, trajectory = np.unique(numbers["rollout_ids"], return_inverse=True)
            numbers["rollout_turn_counts"] = np.bincount(trajectory, weights=trained)[trajectory].astype(np.int32)
        batch = cls(ragged, numbers, {key: list(value) for key, value in fields.items()}, data.get("raw_reward"))
        validate.columns(batch.ragged, batch.numbers, name_of)
        return batch

    def take(self, positions: Sequence[int] | np.ndarray) -> RolloutColumns:
        """Return the samples at ``positions``, in that order, in new contiguous columns (raw_reward likewise)."""
        index = np.asarray(positions, dtype=np.int64)
        raw = self.raw_reward
        return RolloutColumns(
            ragged={key: column.take(index) for key, column in self.ragged.items()},
            numbers={key: column[index] for key, column in self.numbers.items()},
            objects={key: [column[i] for i in index.tolist()] for key, column in self.objects.items()},
            raw_reward=[raw[i] for i in index.tolist()] if validate.has_entries(raw, len(self)) else raw,
        )

    def shards(self, schedule: DpSchedule) -> list[RolloutShard]:
        """Return one shard per data-parallel rank: the samples of its partition and the schedule it follows."""
        return [
            RolloutShard(
                batch=self.take(partition),
                dp_rank=rank,
                partition=list(partition),
                micro_batch_indices=schedule.micro_batch_indices[rank],
                num_microbatches=schedule.num_microbatches,
                global_batch_sizes=schedule.global_batch_sizes,
                batch_raw_reward=self.raw_reward,
                batch_total_lengths=self.total_lengths,
            )
            for rank, partition in enumerate(schedule.partitions)
        ]


@dataclass(frozen=True, eq=False)
class RolloutShard:
    """The samples and micro-batches that one data-parallel rank trains on.

    batch: the rank's samples, step after step and micro-batch after micro-batch. partition: their positions in the
    whole batch. micro_batch_indices: per micro-batch the positions *within this shard*, over all steps.
    num_microbatches, global_batch_sizes: per optimizer step. batch_raw_reward, batch_total_lengths: of all samples of
    all ranks.
    """

    batch: RolloutColumns
    dp_rank: int
    partition: list[int]
    micro_batch_indices: list[list[int]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    batch_raw_reward: Any
    batch_total_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.batch)

    def with_values(self, convert: Callable[[Any], Any]) -> RolloutShard:
        """Return this shard with the values of its per-token fields replaced by ``convert`` of them.

        A transport of tensors takes them as such, and they are arrays again behind it. No memory is copied.
        """
        ragged = {key: replace(column, values=convert(column.values)) for key, column in self.batch.ragged.items()}
        return replace(self, batch=replace(self.batch, ragged=ragged))

    def to_rollout_data(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return ``to_tensors`` with lists of tensors, one per sample, for columns: the form that hooks know."""
        from slime.batching.ragged_tensor import as_lists

        data = self.to_tensors(device)
        as_lists(data)
        return data

    def to_tensors(
        self, device: torch.device | str = "cpu", images_on: torch.device | str | None = None
    ) -> dict[str, Any]:
        """Return the dict that training stages work on, with columns on ``device``.

        ``RaggedTensor`` columns, writable: tokens int64 [total_length], loss_masks int32 [response_length],
        rollout_log_probs and teacher_log_probs float32 [response_length], top-p ids and offsets int32.
        rollout_routed_experts [total_length - 1, layers, topk] stay on the CPU, multimodal_train_inputs go to
        ``images_on`` if that is given. response_lengths, total_lengths,
        rewards, truncated, sample_indices, rollout_ids, rollout_turn_counts: lists of Python numbers;
        rollout_mask_sums: float32 tensor [n].
        raw_reward is that of the whole batch, local_raw_reward that of this shard (absent without raw rewards). The
        schedule is under partition, micro_batch_indices, num_microbatches and global_batch_sizes.
        """
        # Only trainers make tensors; the manager, which makes shards, starts without torch.
        import torch

        from slime.batching.ragged_tensor import RaggedTensor

        dtypes = {"tokens": torch.int64, "loss_masks": torch.int32}
        data: dict[str, Any] = {
            "partition": self.partition,
            "micro_batch_indices": self.micro_batch_indices,
            "num_microbatches": self.num_microbatches,
            "global_batch_sizes": self.global_batch_sizes,
            "total_lengths": self.batch.total_lengths.tolist(),
        }
        for key, column in self.batch.ragged.items():
            values = torch.from_numpy(column.values.copy())  # it may be read-only shared memory
            values = values.to("cpu" if key == "rollout_routed_experts" else device)
            data[key] = RaggedTensor(values.to(dtypes.get(key, values.dtype)), column.lengths.tolist())
        for key, numbers in self.batch.numbers.items():
            data[key] = numbers.tolist()
        data["rollout_mask_sums"] = torch.from_numpy(self.batch.numbers["rollout_mask_sums"].copy()).to(device)
        data.update({key: list(objects) for key, objects in self.batch.objects.items()})
        if "multimodal_train_inputs" in data:
            place = device if images_on is None else images_on
            data["multimodal_train_inputs"] = [_moved(inputs, place) for inputs in data["multimodal_train_inputs"]]
        if self.batch_raw_reward is not None:
            data["raw_reward"] = _plain(self.batch_raw_reward)
            data["local_raw_reward"] = _plain(self.batch.raw_reward)
        return data


def _moved(inputs: object, device: torch.device | str) -> Any:
    import torch

    if not isinstance(inputs, Mapping):
        return inputs
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}


def fill_rollout_ids(rollout_ids: Sequence[int | None]) -> list[int]:
    """Replace every None by the smallest integer not used yet, in order: each such sample is a separate trajectory."""
    used = {rollout_id for rollout_id in rollout_ids if rollout_id is not None}
    filled: list[int] = []
    candidate = 0
    for rollout_id in rollout_ids:
        if rollout_id is None:
            while candidate in used:
                candidate += 1
            rollout_id = candidate
            candidate += 1
        filled.append(_whole(rollout_id, len(filled)))
    return filled


def _whole(rollout_id: SupportsInt, position: int) -> int:
    try:
        if (whole := int(rollout_id)) == rollout_id:
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise TrainDataError(
        f"sample at position {position}: rollout_id {rollout_id!r} is no whole number; expected one, or None"
    )


def _plain(values: object) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
