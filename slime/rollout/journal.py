"""The journal of groups: what rollouts did since the last checkpoint, so that a killed run does not do it again.

Prompts are never in danger: their order follows from the state saved with each checkpoint. What the journal keeps is
work: groups that were generated after it. It is one file per rollout that directly follows a checkpoint,
``<save>/rollout/journal_<rollout>.jsonl``; what later rollouts generate comes from weights that no checkpoint holds,
and is of no use to a resumed run.

Records (see ``journal_file`` for their form): ``begin`` (first; the flags that decide what is generated),
``dispatched`` (indices of groups handed out), ``completed`` (a group with its samples), ``returned`` (a group handed
back, with what was generated of it), ``consumed`` (indices of the groups that a rollout gave to training).

A thread of its own encodes and writes; every record is with the operating system before the next is encoded, and on the
disk at most ``SYNC_INTERVAL_S`` later. A killed process loses what waits for that thread, a lost machine at most that
interval more, and both only work. A disk that fails ends the journal of a rollout with an error in the log, never
the run; the next rollout that is worth keeping tries again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.group_copy import copy_group
from slime.rollout.journal_file import encode_parts, read_records, to_json
from slime.rollout.state_codec import decode_group, encode_group
from slime.utils.atomic_file import name_failure, sync
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FORMAT = 2
READABLE = (1, 2)
SYNC_INTERVAL_S = 2.0
IDLE_S = 0.5
"""How long the writing thread waits for more before it ends."""
BREATH_S = 0.0001
"""The pause after each part that takes long: who encodes without one keeps the interpreter lock from the event loop."""
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

    def line(self) -> list[bytes]:
        """Return the line of this record in parts."""
        if self.samples is None:
            return encode_parts([to_json(self.record)])
        head = {name: value for name, value in self.record.items() if name != "samples"}
        return encode_parts([b'%s,"samples":' % to_json(head)[:-1], *samples_to_json(self.samples), b"}"])


def samples_to_json(group: Any) -> list[bytes]:
    """Return a group as JSON in parts, encoded list by list with breaths in between."""
    if not isinstance(group, list):
        data = to_json(encode_group(group, after_long_list=_breathe))
        _breathe()
        return [data]
    parts = [b"["]
    for number, item in enumerate(group):
        parts += [b","] if number else []
        parts += samples_to_json(item)
    return [*parts, b"]"]


def _breathe() -> None:
    time.sleep(BREATH_S)


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
        self._failed: set[Path] = set()
        self._left_out = 0

    def path(self, rollout_id: int) -> Path:
        """Return the file of what rollout ``rollout_id`` did."""
        return self.folder / f"journal_{rollout_id}.jsonl"

    def resume(self, rollout_id: int) -> Replay:
        """Return what an earlier start did in rollout ``rollout_id``, go on writing there, and remove what is stale."""
        self.flush()
        self._remove(lambda number: number != rollout_id)
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
            if self._path is None or self._path in self._failed:
                return
            if samples is not None and len(self._waiting) >= MAX_WAITING:
                self._leave_out()
                return
            self._waiting.append(_Entry(self._path, record, samples))
            if self._writer is None:
                self._start_writer()
            self._changed.notify_all()

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == 1:
            logger.warning("the disk of %s is too slow for the journal: some groups are left out", self.folder)

    def _open(self, rollout_id: int, *, begin: bool) -> None:
        self._path = self.path(rollout_id)
        self._failed.discard(self._path)
        if begin:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as e:
                self._fail(self._path, e)
            self._put({"kind": "begin", "format": FORMAT, "rollout": rollout_id, "setting": self.setting})

    def _read(self, path: Path) -> Replay | None:
        """Return what ``path`` holds, cut where it is damaged; None when it is of no use here."""
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

    def _remove(self, stale: Any) -> None:
        for path in self.folder.glob("journal_*.jsonl"):
            number = path.stem.removeprefix("journal_")
            if number.isdecimal() and stale(int(number)):
                try:
                    path.unlink(missing_ok=True)
                except OSError as e:
                    logger.warning("%s is of no use any more and cannot be removed: %s", path, e)

    def _run(self) -> None:
        """The writing thread, from the first record to a pause."""
        try:
            self._write_what_waits()
        except Exception:
            logger.exception("the journal of this rollout ends; a resumed run generates again what it would have kept")
            with self._changed:
                self._failed |= {entry.path for entry in self._waiting} | ({self._path} if self._path else set())
                self._waiting.clear()
        with self._changed:
            self._writer = None
            if self._waiting:  # noted since the last look
                self._start_writer()
            self._changed.notify_all()

    def _start_writer(self) -> None:
        self._writer = threading.Thread(target=self._run, name="journal", daemon=True)
        self._writer.start()

    def _write_what_waits(self) -> None:
        synced = time.monotonic()
        unsynced: set[Path] = set()
        while batch := self._next_batch():
            for path, entries in _by_file(batch).items():
                if self._try(path, lambda path=path, entries=entries: _append(path, entries)):  # type: ignore[misc]
                    unsynced.add(path)
            if time.monotonic() - synced >= SYNC_INTERVAL_S:
                self._sync(unsynced)
                synced = time.monotonic()
        self._sync(unsynced)

    def _next_batch(self) -> list[_Entry]:
        with self._changed:
            if not self._waiting and not self._hurry:
                self._changed.wait(IDLE_S)
            batch = list(self._waiting)
            self._waiting.clear()
            return batch

    def _sync(self, paths: set[Path]) -> None:
        for path in paths:
            if path.exists():  # not yet forgotten
                self._try(path, lambda path=path: sync(path))  # type: ignore[misc]
        paths.clear()

    def _try(self, path: Path, action: Callable[[], None]) -> bool:
        """Do something to a file that has not failed; return whether that worked."""
        if path in self._failed:
            return False
        try:
            action()
        except OSError as e:
            self._fail(path, e)
            return False
        return True

    def _fail(self, path: Path, error: OSError) -> None:
        logger.error(
            "the journal of this rollout ends; a resumed run generates again what it would have kept: %s",
            name_failure(error, path),
        )
        with self._changed:
            self._failed.add(path)


def _by_file(batch: Sequence[_Entry]) -> dict[Path, list[_Entry]]:
    files: dict[Path, list[_Entry]] = {}
    for entry in batch:
        files.setdefault(entry.path, []).append(entry)
    return files


def _append(path: Path, entries: Sequence[_Entry]) -> None:
    """Write the entries in order, each as soon as it is encoded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        for entry in entries:
            try:
                line = entry.line()
            except Exception as e:  # noqa: BLE001  (whatever plugins attach to samples, the run goes on)
                logger.warning("group %s is left out of the journal: %s", entry.record.get("group"), e)
                continue
            file.writelines(line)
            file.flush()
