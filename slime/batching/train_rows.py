"""Rows of train data (a dict of lists with an entry per sample): those that wait for a step, and a rollout's own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from slime.batching.columns import OBJECT_FIELDS, WHOLE_FIELDS
from slime.batching.errors import TrainDataError
from slime.batching.rollout_ids import fill_rollout_ids
from slime.batching.validate import has_entries

Rows = dict[str, list[Any]]


def take_rows(data: Mapping[str, Any], positions: Sequence[int], rollout_ids: Sequence[int]) -> Rows:
    """Return copies of the rows at ``positions`` of train data. ``rollout_ids`` are those of all rows, as understood.

    What does not have one entry per row stays behind, and total lengths, which follow from the tokens.
    """
    if not positions:
        return {}
    per_row = {key: values for key, values in data.items() if has_entries(values, len(rollout_ids))}
    rows = {key: [_copy(values[p]) for p in positions] for key, values in per_row.items() if key != "total_lengths"}
    return rows | {"rollout_ids": [rollout_ids[p] for p in positions]}


def join_rows(waiting: Rows, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return train data of the rows that waited, then those of ``data``; rollout ids of the two do not meet.

    A column of objects that only one of them has is filled up with None. Raises TrainDataError for any other.
    """
    if not waiting or not hasattr(data.get("tokens"), "__len__"):
        return data
    count, kept = len(data["tokens"]), len(waiting["tokens"])
    fresh = {key: values for key, values in data.items() if values is not None and key != "total_lengths"}
    if not has_entries(fresh.setdefault("rollout_ids", [None] * count), count):
        return data  # which is refused as it is
    per_row = {key for key, values in fresh.items() if has_entries(values, count)}
    if uneven := (waiting.keys() ^ per_row) - {*WHOLE_FIELDS, *OBJECT_FIELDS}:
        raise TrainDataError(
            f"train data of this rollout ({count} rows) and {kept} rows that wait for a step since the last one "
            f"must have the same columns; only one of them has {', '.join(sorted(uneven))}"
        )
    filled = (waiting.keys() ^ per_row) & set(OBJECT_FIELDS)
    joined = {
        key: [*waiting.get(key, [None] * kept), *(fresh[key] if key in per_row else [None] * count)]
        for key in (waiting.keys() & per_row) | filled
    }
    ids = fill_rollout_ids(fresh["rollout_ids"])
    return fresh | joined | {"rollout_ids": [*unused_ids(waiting["rollout_ids"], ids), *ids]}


def unused_ids(rollout_ids: Sequence[Hashable], used: Sequence[int]) -> list[int]:
    """Return other ids for ``rollout_ids``, alike where those are alike, none of them ``used``."""
    lowest = min([0, *used])
    names: dict[Hashable, int] = {}
    return [names.setdefault(i, lowest - 1 - len(names)) for i in rollout_ids]


def _copy(value: Any) -> Any:
    copy = getattr(value, "clone", None) or getattr(value, "copy", None)
    return copy() if copy is not None else value
