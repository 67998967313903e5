"""Rows of train data (a dict of lists with an entry per sample): those that wait for a step, and a rollout's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from slime.batching.columns import WHOLE_FIELDS
from slime.batching.errors import TrainDataError
from slime.batching.validate import has_entries

Rows = dict[str, list[Any]]


def take_rows(data: Mapping[str, Any], positions: Sequence[int], rollout_ids: Sequence[int]) -> Rows:
    """Return the rows at ``positions`` of train data. ``rollout_ids`` are those of all rows, as they were understood.

    What does not have one entry per row stays behind, and total lengths, which follow from the tokens.
    """
    if not positions:
        return {}
    per_row = {key: values for key, values in data.items() if has_entries(values, len(rollout_ids))}
    rows = {key: [values[p] for p in positions] for key, values in per_row.items() if key != "total_lengths"}
    return rows | {"rollout_ids": [rollout_ids[p] for p in positions]}


def join_rows(waiting: Rows, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return train data of the rows that waited, then those of ``data``; rollout ids of the two do not meet.

    Raises TrainDataError for a column that only one of them has.
    """
    if not waiting or not hasattr(data.get("tokens"), "__len__"):
        return data
    count, kept = len(data["tokens"]), len(waiting["tokens"])
    fresh = {key: values for key, values in data.items() if values is not None and key != "total_lengths"}
    fresh["rollout_ids"] = fresh.get("rollout_ids", [None] * count)
    per_row = {key for key, values in fresh.items() if has_entries(values, count)}
    if uneven := (waiting.keys() ^ per_row) - set(WHOLE_FIELDS):
        raise TrainDataError(
            f"train data of this rollout ({count} rows) and {kept} rows that wait for a step since the last one "
            f"must have the same columns; only one of them has {', '.join(sorted(uneven))}"
        )
    ids = unused_ids(waiting["rollout_ids"], fresh["rollout_ids"])
    joined = {key: [*waiting[key], *fresh[key]] for key in waiting.keys() & per_row}
    return fresh | joined | {"rollout_ids": [*ids, *fresh["rollout_ids"]]}


def unused_ids(rollout_ids: Sequence[Any], used: Sequence[Any]) -> list[int]:
    """Return other ids for ``rollout_ids``, alike where those are alike, none of them ``used``."""
    lowest = int(min((i for i in used if isinstance(i, Real)), default=0))
    names: dict[Any, int] = {}
    return [names.setdefault(i, min(lowest, 0) - 1 - len(names)) for i in rollout_ids]
