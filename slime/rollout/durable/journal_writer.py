"""The thread that writes the journal of groups, so that a rollout does not wait for the disk or for encoding."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.rollout.durable.journal_file import encode_parts, to_json
from slime.rollout.durable.state_codec import encode_group
from slime.utils.atomic_file import name_failure, sync

if TYPE_CHECKING:
    from slime.utils.types import Sample

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 2.0
IDLE_S = 0.5
"""Time that the thread waits for more before it ends."""
BREATH_S = 0.0001
"""The pause after each part that takes long: who encodes without one keeps the interpreter lock from the event loop."""
MAX_WAITING = 4096
"""Records waiting to be written; with more, groups are left out: a slow disk costs work, not memory."""


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


def samples_to_json(group: Sample | list[Any]) -> list[bytes]:
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


class JournalWriter:
    """Appends records to files in the order in which they come. A file that fails is not written to any more.

    Methods may be called from several threads; but for ``flush`` they do not wait for the disk.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._hurry = 0
        self._failed: set[Path] = set()
        self._left_out = 0

    def put(self, path: Path, record: dict[str, Any], samples: Sample | list[Any] | None = None) -> None:
        """Write ``record`` to ``path``, with ``samples``, which must not change from now on, as its samples."""
        with self._changed:
            if path in self._failed:
                return
            if samples is not None and len(self._waiting) >= MAX_WAITING:
                self._left_out += 1
                if self._left_out == 1:
                    logger.warning("the disk of %s is too slow for the journal: some groups are left out", path.parent)
                return
            self._waiting.append(_Entry(path, record, samples))
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def forget_failure(self, path: Path) -> None:
        """Try again to write to ``path``."""
        self._failed.discard(path)

    def fail(self, path: Path, error: Exception) -> None:
        """Write no more to ``path``, and log why."""
        logger.error(
            "the journal of this rollout ends; a resumed run generates again what it would have kept: %s",
            name_failure(error, path) if isinstance(error, OSError) else repr(error),
            exc_info=None if isinstance(error, OSError) else error,
        )
        with self._changed:
            self._failed.add(path)

    def flush(self) -> None:
        """Return when everything noted so far is in the files."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            while self._waiting or self._thread is not None:
                self._changed.wait()
            self._hurry -= 1

    # Inside

    def _run(self) -> None:
        """The writing thread, from the first record to a pause."""
        try:
            self._write_what_waits()
        finally:
            with self._changed:
                self._thread = None
                if self._waiting:  # noted since the last look
                    self._start()
                self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _write_what_waits(self) -> None:
        synced = time.monotonic()
        unsynced: set[Path] = set()
        while batch := self._next_batch():
            files: dict[Path, list[_Entry]] = {}
            for entry in batch:
                files.setdefault(entry.path, []).append(entry)
            for path, entries in files.items():
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
            self._try(path, lambda path=path: _sync_file(path))  # type: ignore[misc]
        paths.clear()

    def _try(self, path: Path, action: Callable[[], None]) -> bool:
        """Do something to a file that has not failed; return whether that worked."""
        if path in self._failed:
            return False
        try:
            action()
        except Exception as e:  # noqa: BLE001  (what a journal meets with must not end the run, nor be waited for)
            self.fail(path, e)
            return False
        return True


def _sync_file(path: Path) -> None:
    if path.exists():  # not yet forgotten
        sync(path)


def _append(path: Path, entries: Sequence[_Entry]) -> None:
    """Write the entries in order, each as soon as it is encoded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        for entry in entries:
            try:
                line = entry.line()
            except Exception as e:  # noqa: BLE001  (the run continues with anything that plugins attach to samples)
                logger.warning("group %s is left out of the journal: %s", entry.record.get("group"), e)
                continue
            file.writelines(line)
            file.flush()
