"""The checkpoint that a host keeps for its engines, renewed by the changes between versions of the weights.

One directory ``<local>/weight_v000012`` is a whole Hugging Face checkpoint. ``state.json`` inside says which version it
holds, and is written last: what an apply that ended half-way leaves, or another run, is not taken for something else
but replaced by a copy of the last whole version and the changes since. No torch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from slime.utils.atomic_file import write_atomically
from slime.utils.cores import usable_cores
from slime.utils.structured_error import StructuredError
from slime.weights import versions
from slime.weights.delta.codec import Array, CorruptDeltaError, apply, checksum
from slime.weights.delta.manifest import MANIFEST, Entry, Manifest, Version

logger = logging.getLogger(__name__)

STATE = "state.json"
MAX_THREADS = 32
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NoWayError(StructuredError):
    """The changes on the shared directory do not lead to the version that is asked for.

    The driver has a whole version written then.
    """

    def __init__(self, target: Version, why: object) -> None:
        message = f"no way from a whole version of the weights to {target}: {why}"
        super().__init__(message, {"needs_full_version": True})


@dataclass(frozen=True)
class State:
    """Content of a directory: ``version``; anything between it and ``applying``, unless that is None.

    ``boot``: of the machine. What is written is not waited for on its way to the disk: a restart may lose some of it.
    """

    version: Version
    applying: Version | None
    boot: str

    def write(self, directory: Path) -> None:
        write_atomically(directory / STATE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> State | None:
        """Return that of ``directory``; None where there is none to be trusted."""
        try:
            found = json.loads((directory / STATE).read_text())
            applying = found["applying"]
            state = cls(Version(**found["version"]), Version(**applying) if applying else None, found["boot"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return state if state.boot == _boot() else None


def pull(source: str | Path, local_root: str | Path, before_read: versions.BeforeRead = None) -> Path:
    """Bring the checkpoint of this host to the version ``source``, verified; return its directory.

    Several engines of a host may ask at once: the first one does it, the others wait and take what it has; for
    ``before_read`` see ``versions.pull``. Raises FileNotFoundError when this host does not see ``source``,
    CorruptFileError naming a file of a whole version that differs from its checksum, NoWayError where changes are
    missing or damaged.
    """
    source, local_root = Path(source), Path(local_root)
    with versions.reading(source, local_root, before_read):
        target = Manifest.parse(versions.read(source / MANIFEST), source)
        for directory in versions.versions(local_root):
            state = State.read(directory)
            if state is None:
                continue
            try:
                if (found := _continue(directory, state, source, target)) is not None:
                    return found
            except (NoWayError, CorruptDeltaError) as e:
                logger.warning("%s: %s; copying a whole version again", directory, e)
        return _renew(source, target, local_root)


def _continue(directory: Path, state: State, source: Path, target: Manifest) -> Path | None:
    """Apply what leads from ``state`` to ``target``; None where only a whole version does."""
    if state.version == target.version and state.applying is None:
        return directory
    steps = _steps(source, target, state.version)
    if steps[0].base is None:
        return None
    # The new values can be written again over some of them, differences cannot.
    if state.applying is not None and not (steps[0].version == state.applying and steps[0].encoding == "overwrite"):
        logger.warning("%s was left between version %s and %s", directory, state.version, state.applying)
        return None
    return _apply_all(directory, source.parent, steps)


def _renew(source: Path, target: Manifest, local_root: Path) -> Path:
    """Copy the last whole version, and apply what has changed since."""
    steps = _steps(source, target, None)
    whole = versions.version_dir(source.parent, steps[0].version.number)
    versions.clear(local_root)
    directory = local_root / whole.name
    versions.copy_listed(whole, directory)
    State(steps[0].version, None, _boot()).write(directory)
    try:
        return _apply_all(directory, source.parent, steps[1:])
    except CorruptDeltaError as e:
        raise NoWayError(target.version, e) from e


def _steps(source: Path, target: Manifest, here: Version | None) -> list[Manifest]:
    """Return the versions to apply in turn up to ``target``; the first is whole, unless it changes ``here``."""
    steps = [target]
    while (base := steps[0].base) is not None and base != here:
        directory = versions.version_dir(source.parent, base.number)
        try:
            found = Manifest.read(directory)
        except (OSError, ValueError) as e:
            raise NoWayError(target.version, f"{directory} cannot be read: {e}") from e
        if found.version != base:
            raise NoWayError(target.version, f"expected version {base} in {directory}, found {found.version}")
        steps.insert(0, found)
    return steps


def _apply_all(directory: Path, shared: Path, steps: Iterable[Manifest]) -> Path:
    for step in steps:
        assert step.base is not None
        source = versions.version_dir(shared, step.version.number)
        State(step.base, step.version, _boot()).write(directory)
        _patch(directory, source, step)
        renewed = directory.with_name(source.name)
        os.rename(directory, renewed)
        directory = renewed
        State(step.version, None, _boot()).write(directory)
    return directory


def _patch(directory: Path, source: Path, step: Manifest) -> None:
    """Write the changes of ``step`` into the files of ``directory``, and compare what they have become."""
    changes: dict[str, Array] = {}
    files: dict[str, Array] = {}
    try:
        for entry in step.tensors.values():
            assert entry.payload is not None
            if entry.payload.file not in changes:
                changes[entry.payload.file] = _mapped(source / entry.payload.file, "r")
            if entry.file not in files:
                files[entry.file] = _mapped(directory / entry.file, "r+")
    except (OSError, ValueError) as e:
        raise CorruptDeltaError(f"{type(e).__name__}: {e}") from e

    def patch(item: tuple[str, Entry]) -> None:
        name, entry = item
        payload = entry.payload
        assert payload is not None
        target = files[entry.file][entry.offset : entry.offset + entry.bytes]
        change = changes[payload.file][payload.offset : payload.offset + payload.bytes]
        try:
            apply(change.data, payload.form, target, entry.itemsize, xor=step.encoding == "xor")
        except CorruptDeltaError as e:
            raise CorruptDeltaError(f"{name}: {e}") from e
        if (found := checksum(target.data, step.checksum)) != entry.sum:
            raise CorruptDeltaError(
                f"{name} has {step.checksum} {found} with the changes of {source}, expected {entry.sum}"
            )

    with ThreadPoolExecutor(min(MAX_THREADS, usable_cores())) as pool:
        for _ in pool.map(patch, step.tensors.items()):
            pass


def _mapped(path: Path, mode: Literal["r", "r+"]) -> Array:
    return np.asarray(np.memmap(path, np.uint8, mode)) if path.stat().st_size else np.empty(0, np.uint8)


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
