"""Exact moments at which a run kills itself and all of its process group, as ``kill -9`` from outside would."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.rollout.durable import journal_writer, recovery
from slime.utils import atomic_file

STATE, MODEL, TRACKER = "global_dataset_state_dict", "model_", "latest_checkpointed_iteration"


def die() -> None:
    """End this process group, this very moment."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _on_call(owner: Any, name: str, concerns: Callable[..., bool], kill: Callable[..., Any]) -> Callable[[int], None]:
    """Return what lets ``kill`` take the place of the nth call of ``owner.name`` that ``concerns`` holds for."""

    def install(nth: int) -> None:
        original, seen = getattr(owner, name), 0

        def replaced(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += bool(concerns(*args, **kwargs))
            if seen >= nth and concerns(*args, **kwargs):
                kill(original, *args, **kwargs)
                die()
            return original(*args, **kwargs)

        setattr(owner, name, replaced)

    return install


def _any(*_: Any, **__: Any) -> bool:
    return True


def _before(original: Any, *_: Any, **__: Any) -> None:
    """Die instead."""


def _after(original: Any, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)


def _half_file(original: Any, path: Path, data: bytes) -> None:
    original(path, data[: len(data) // 2])


def _half_record(original: Any, path: Path, entries: Any) -> None:
    data = b"".join(entries[0].line())
    with open(path, "ab") as file:
        file.write(data[: 2 * len(data) // 3])


def _one_record(original: Any, path: Path) -> None:
    records: Iterator[Any] = original(path)
    next(records, None)


def _writes(part: str) -> Callable[..., bool]:
    return lambda path, *_: part in path.name


def _renames(part: str) -> Callable[..., bool]:
    return lambda source, target: part in Path(target).name


WHILE_RUNNING: dict[str, Callable[[int], None]] = {
    "half of the state is written": _on_call(Path, "write_bytes", _writes(STATE), _half_file),
    "the state is not renamed yet": _on_call(atomic_file.os, "replace", _renames(STATE), _before),
    "the state is renamed": _on_call(atomic_file.os, "replace", _renames(STATE), _after),
    "half of the checkpoint is written": _on_call(Path, "write_bytes", _writes(MODEL), _half_file),
    "the checkpoint is whole, the tracker old": _on_call(Path, "write_bytes", _writes(TRACKER), _before),
    "the tracker is new": _on_call(atomic_file.os, "replace", _renames(TRACKER), _after),
    "half of a record is written": _on_call(journal_writer, "_append", _any, _half_record),
    "the journal is to be synced": _on_call(journal_writer, "sync", _any, _before),
    "what is trained on is noted": _on_call(recovery.Recovery, "consumed", _any, _after),
    "the rollout is over": _on_call(recovery.Recovery, "after_rollout", _any, _before),
    "the journal of the next rollout is open": _on_call(recovery.Recovery, "after_rollout", _any, _after),
    "old journals are removed": _on_call(recovery.GroupJournal, "forget_before", _any, _after),
}
WHILE_STARTING: dict[str, Callable[[int], None]] = {
    "it has just started": lambda nth: die(),
    "the state is loaded": _on_call(recovery.Recovery, "resume", _any, _before),
    "one record is read": _on_call(recovery, "read_records", _any, _one_record),
    "the torn end is to be cut off": _on_call(os, "truncate", _any, _before),
    "the torn end is cut off": _on_call(os, "truncate", _any, _after),
    "stale journals are removed": _on_call(recovery, "remove_journals", _any, _after),
    "the journal is open again": _on_call(recovery.GroupJournal, "_open", _any, _after),
}
POINTS = WHILE_RUNNING | WHILE_STARTING
