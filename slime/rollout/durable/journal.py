"""The journal of groups: what rollouts did since the last checkpoint, so that a killed run does not do it again.

Prompts are never in danger: their order follows from the state saved with each checkpoint. What the journal keeps is
work: groups that were generated after it. It is one file per rollout that directly follows a checkpoint,
``<save>/rollout/journal_<rollout>.jsonl``; what later rollouts generate comes from weights that no checkpoint holds,
and is of no use to a resumed run.

Records (see ``journal_file`` for their form): ``begin`` (first; the flags that decide what is generated),
``dispatched`` (indices of groups handed out), ``completed`` (a group with its samples), ``returned`` (a group handed
back, with what was generated of it), ``consumed`` (indices of the groups that a rollout gave to training).

A separate thread (``journal_writer``) encodes and writes; every record is with the operating system before the next
is encoded, and on the disk at most ``SYNC_INTERVAL_S`` later. A killed process loses what waits for that thread, a lost
machine at most that interval more, and both only work. A disk that fails ends the journal of a rollout with an error in
the log, never the run; the next rollout that is worth keeping tries again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.rollout.durable.journal_file import read_records
from slime.rollout.durable.journal_writer import JournalWriter
from slime.rollout.durable.state_codec import decode_group
from slime.rollout.groups import copy_group
from slime.utils.types import Sample, iter_samples

logger = logging.getLogger(__name__)

FORMAT = 2
READABLE = (1, 2)


def group_index(group: Sample | list[Any]) -> int | None:
    """Return the number that the data source gave to a group, None when its first sample has none."""
    first = next(iter_samples(group), None)
    return None if first is None else first.group_index


@dataclass
class Replay:
    """A journal's contents: groups dispatched in order, the last state of each group generated, groups by rollout."""

    dispatched: list[int] = field(default_factory=list)
    generated: dict[int, Any] = field(default_factory=dict)
    consumed: dict[int, list[int]] = field(default_factory=dict)

    def apply(self, record: dict[str, Any]) -> None:
        """Take one record in. Records of other kinds are of no interest here."""
        kind = record["kind"]
        if kind == "dispatched":
            self.dispatched += record["groups"]
        elif kind == "consumed":
            self.consumed[record["rollout"]] = record["groups"]
        elif kind in ("completed", "returned"):
            if record["samples"] is None:
                self.generated.pop(record["group"], None)
            else:
                self.generated[record["group"]] = record["samples"]


class GroupJournal:
    """Writes the journal of a run in ``folder``, and reads what an earlier start with the same ``setting`` left.

    ``setting`` (JSON types) holds what determines what is generated: groups made under another one are not used.
    Methods may be called from several threads and do not wait for the disk.
    """

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.folder = folder
        self.setting = setting
        self._path: Path | None = None
        self._writer = JournalWriter()

    def path(self, rollout_id: int) -> Path:
        """Return the file of what rollout ``rollout_id`` did."""
        return self.folder / f"journal_{rollout_id}.jsonl"

    def resume(self, rollout_id: int) -> Replay:
        """Return what an earlier start did in rollout ``rollout_id``, continue writing there, and remove what is stale.

        Raises ValueError, naming the file, for one that is damaged.
        """
        self.flush()
        remove_journals(self.folder, lambda number: number != rollout_id)
        path = self.path(rollout_id)
        try:
            replay = self._read(path) if path.exists() else None
        except OSError as e:
            logger.error("%s cannot be used; what it holds is generated again: %s", path, e)
            replay = None
        self._open(rollout_id, begin=replay is None)
        return replay or Replay()

    def turn_over(self, rollout_id: int, *, wanted: bool) -> None:
        """From now on write about rollout ``rollout_id``, or with ``wanted`` off nothing."""
        if wanted:
            self._open(rollout_id, begin=True)
        else:
            self._path = None

    def forget_before(self, rollout_id: int) -> None:
        """Remove the files of earlier rollouts: their checkpoints have been followed by another one."""
        remove_journals(self.folder, lambda number: number < rollout_id)

    def dispatched(self, groups: Sequence[Any]) -> None:
        """Note that ``groups`` were handed out."""
        if numbers := [n for n in map(group_index, groups) if n is not None]:
            self._put({"kind": "dispatched", "groups": numbers})

    def completed(self, group: Sample | list[Any]) -> None:
        """Keep a finished group, as it is now."""
        self._put_group("completed", group)

    def returned(self, group: Sample | list[Any]) -> None:
        """Keep a group that was handed back, as it is now; one that is as it was drawn has nothing to keep."""
        self._put_group("returned", group)

    def consumed(self, rollout_id: int, numbers: Sequence[int]) -> None:
        """Note that rollout ``rollout_id`` trains on the groups ``numbers``."""
        self._put({"kind": "consumed", "rollout": rollout_id, "groups": list(numbers)})

    def flush(self) -> None:
        """Return when everything noted so far is in the files."""
        self._writer.flush()

    # Inside

    def _put_group(self, kind: str, group: Sample | list[Any]) -> None:
        number = group_index(group)
        if self._path is None or number is None:
            return
        drawn = all(s.status == Sample.Status.PENDING and not s.response_length for s in iter_samples(group))
        record = {"kind": kind, "group": number, "samples": None}
        self._put(record, None if drawn else copy_group(group))

    def _put(self, record: dict[str, Any], samples: Sample | list[Any] | None = None) -> None:
        if (path := self._path) is not None:
            self._writer.put(path, record, samples)

    def _open(self, rollout_id: int, *, begin: bool) -> None:
        path = self.path(rollout_id)
        self._writer.forget_failure(path)
        if begin:
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                self._writer.fail(path, e)
            self._writer.put(path, {"kind": "begin", "format": FORMAT, "rollout": rollout_id, "setting": self.setting})
        self._path = path

    def _read(self, path: Path) -> Replay | None:
        """Return what ``path`` holds, without what a kill left of its last line; None when it is of no use here."""
        replay, end = Replay(), 0
        for number, (record, position) in enumerate(read_records(path)):
            if number == 0 and record.get("format") not in READABLE:
                logger.warning("%s is not used: it is of another version of slime (%s)", path, record.get("format"))
                return None
            if number == 0 and record.get("setting") != self.setting:
                logger.warning("%s is not used: the flags that decide over what is generated have changed", path)
                return None
            replay.apply(record)
            end = position
        if (torn := path.stat().st_size - end) > 0:
            logger.warning("%s: the last %d bytes are no whole record and are cut off", path, torn)
            os.truncate(path, end)
        if end == 0:
            return None
        replay.generated = {number: decode_group(samples) for number, samples in replay.generated.items()}
        return replay


def remove_journals(folder: Path, stale: Callable[[int], bool]) -> None:
    """Remove the journals in ``folder`` of the rollouts that are ``stale``."""
    for path in folder.glob("journal_*.jsonl"):
        number = path.stem.removeprefix("journal_")
        if number.isdecimal() and stale(int(number)):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                logger.warning("%s is of no use any more and cannot be removed: %s", path, e)
