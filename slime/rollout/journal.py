"""The journal of groups: what rollouts did since the last checkpoint, so that a killed run does not do it again.

Prompts are never in danger: their order follows from the state saved with each checkpoint. What the journal keeps is
work: groups that were generated after it. It is one file per rollout that directly follows a checkpoint,
``<save>/rollout/journal_<rollout>.jsonl``; what later rollouts generate comes from weights that no checkpoint holds,
and is of no use to a resumed run.

Records (see ``journal_file`` for their form): ``begin`` (first; the flags that decide what is generated),
``dispatched`` (indices of groups handed out), ``completed`` (a group with its samples), ``returned`` (a group handed
back, with what was generated of it), ``consumed`` (indices of the groups that a rollout gave to training).

A thread of its own encodes and writes in batches; every batch is with the operating system before the next begins, and
on the disk at most ``SYNC_INTERVAL_S`` later. A killed process loses at most the batch in progress, a lost machine at
most that interval, and both only work. A disk that fails stops the journal with an error in the log, never the run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.group_copy import copy_group
from slime.rollout.journal_file import encode_body, encode_record, read_records, to_json
from slime.rollout.state_codec import NotStorable, decode_group, encode_group
from slime.utils.atomic_file import sync
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FORMAT = 1
SYNC_INTERVAL_S = 2.0
IDLE_S = 0.5
"""How long the writing thread waits for more before it ends."""
MAX_WAITING = 4096
"""Records waiting to be written; with more, groups are left out: a slow disk costs work, not memory."""


def group_index(group: Any) -> int | None:
    """Return the number that the data source gave to a group, None when its first sample has none."""
    first = next(iter_samples(group), None)
    return None if first is None else first.group_index


@dataclass
class Replay:
    """What a journal says: groups dispatched in order, the last state of each group generated, groups by rollout."""

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


@dataclass(frozen=True)
class _Entry:
    path: Path
    record: dict[str, Any]
    samples: Any = None

    def line(self) -> bytes:
        if self.samples is None:
            return encode_record(self.record)
        head = {name: value for name, value in self.record.items() if name != "samples"}
        return encode_body(b'%s,"samples":%s}' % (to_json(head)[:-1], _samples_to_json(self.samples)))


def _samples_to_json(group: Any) -> bytes:
    """Encode sample by sample: one long call would keep every other thread of the process waiting."""
    if isinstance(group, list):
        return b"[%s]" % b",".join(map(_samples_to_json, group))
    return to_json(encode_group(group))


class GroupJournal:
    """Writes the journal of a run in ``folder``, and reads what an earlier start with the same ``setting`` left.

    ``setting`` (JSON types) says what decides over what is generated: groups made under another one are not used.
    Methods may be called from several threads and do not wait for the disk.
    """

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.folder = folder
        self.setting = setting
        self._path: Path | None = None
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._hurry = 0
        self._failed = False
        self._left_out = 0

    def path(self, rollout_id: int) -> Path:
        """Return the file of what rollout ``rollout_id`` did."""
        return self.folder / f"journal_{rollout_id}.jsonl"

    def resume(self, rollout_id: int) -> Replay:
        """Return what an earlier start did in rollout ``rollout_id``, go on writing there, and remove what is stale."""
        self.flush()
        self._remove(lambda number: number != rollout_id)
        path = self.path(rollout_id)
        replay = self._read(path) if path.exists() else None
        self._open(rollout_id, begin=replay is None)
        return replay or Replay()

    def turn_over(self, rollout_id: int, *, wanted: bool) -> None:
        """From now on write about rollout ``rollout_id``, or with ``wanted`` off nothing."""
        with self._changed:
            if wanted:
                self._open(rollout_id, begin=True)
            else:
                self._path = None

    def forget_before(self, rollout_id: int) -> None:
        """Remove the files of earlier rollouts: their checkpoints have been followed by another one."""
        self._remove(lambda number: number < rollout_id)

    def dispatched(self, groups: Sequence[Any]) -> None:
        """Note that ``groups`` were handed out."""
        if numbers := [n for n in map(group_index, groups) if n is not None]:
            self._put({"kind": "dispatched", "groups": numbers})

    def completed(self, group: Any) -> None:
        """Keep a finished group, as it is now."""
        self._put_group("completed", group)

    def returned(self, group: Any) -> None:
        """Keep a group that was handed back, as it is now; one that is as it was drawn has nothing to keep."""
        self._put_group("returned", group)

    def consumed(self, rollout_id: int, numbers: Sequence[int]) -> None:
        """Note that rollout ``rollout_id`` trains on the groups ``numbers``."""
        self._put({"kind": "consumed", "rollout": rollout_id, "groups": list(numbers)})

    def flush(self) -> None:
        """Return when everything noted so far is in the files."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            while self._waiting or self._writer is not None:
                self._changed.wait()
            self._hurry -= 1

    # Inside

    def _put_group(self, kind: str, group: Any) -> None:
        number = group_index(group)
        if self._path is None or number is None:
            return
        drawn = all(s.status == Sample.Status.PENDING and not s.response_length for s in iter_samples(group))
        record = {"kind": kind, "group": number, "samples": None}
        self._put(record, None if drawn else copy_group(group))

    def _put(self, record: dict[str, Any], samples: Any = None) -> None:
        with self._changed:
            if self._path is None or self._failed:
                return
            if samples is not None and len(self._waiting) >= MAX_WAITING:
                self._leave_out()
                return
            self._waiting.append(_Entry(self._path, record, samples))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_what_waits, name="journal", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == 1:
            logger.warning("the disk of %s is too slow for the journal: some groups are left out", self.folder)

    def _open(self, rollout_id: int, *, begin: bool) -> None:
        self._path = self.path(rollout_id)
        if begin:
            self._path.unlink(missing_ok=True)
            self._put({"kind": "begin", "format": FORMAT, "rollout": rollout_id, "setting": self.setting})

    def _read(self, path: Path) -> Replay | None:
        """Return what ``path`` holds, cut where it is damaged; None when it is of no use here."""
        replay, end = Replay(), 0
        for number, (record, position) in enumerate(read_records(path)):
            if number == 0 and (record.get("format"), record.get("setting")) != (FORMAT, self.setting):
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

    def _remove(self, stale: Any) -> None:
        for path in self.folder.glob("journal_*.jsonl"):
            number = path.stem.removeprefix("journal_")
            if number.isdecimal() and stale(int(number)):
                path.unlink(missing_ok=True)

    def _write_what_waits(self) -> None:
        synced = time.monotonic()
        unsynced: set[Path] = set()
        while batch := self._next_batch():
            try:
                unsynced |= _append(batch)
                if time.monotonic() - synced >= SYNC_INTERVAL_S:
                    _sync(unsynced)
                    synced = time.monotonic()
            except OSError as e:
                self._fail(e)
        try:
            _sync(unsynced)
        except OSError as e:
            self._fail(e)
        with self._changed:
            # what was noted since the last look is the next thread's
            self._writer = None
            if self._waiting:
                self._writer = threading.Thread(target=self._write_what_waits, name="journal", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def _next_batch(self) -> list[_Entry]:
        with self._changed:
            if not self._waiting and not self._hurry:
                self._changed.wait(IDLE_S)
            batch = list(self._waiting)
            self._waiting.clear()
            return batch

    def _fail(self, error: OSError) -> None:
        logger.error("the journal stops; a resumed run generates again what it would have kept: %s", error)
        with self._changed:
            self._failed = True
            self._waiting.clear()


def _append(batch: Sequence[_Entry]) -> set[Path]:
    """Write the entries in order, one write per run of entries of the same file; return the files."""
    lines: dict[Path, list[bytes]] = {}
    for entry in batch:
        try:
            lines.setdefault(entry.path, []).append(entry.line())
        except NotStorable as e:
            logger.warning("a group is left out of the journal: %s", e)
    for path, content in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(b"".join(content))
    return set(lines)


def _sync(paths: set[Path]) -> None:
    for path in paths:
        if path.exists():  # not yet forgotten
            sync(path)
    paths.clear()
