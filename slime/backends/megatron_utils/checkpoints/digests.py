"""Digests of the files of a checkpoint: computed and compared by all ranks together, each its share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from slime.backends.megatron_utils.state.parallel import first_error, gather_from_world
from slime.utils import digests

HAS_DIGESTS = "slime_digests"
"""In what a checkpoint holds beside tensors: that its digests were written."""
WAY_BACK = "Choose another iteration with --ckpt-step"
WAY_BACK_OF_HF = f"Fetch or export the checkpoint again; if you changed its weights, remove its {digests.FILE}"

_compared: set[tuple[str | int, ...]] = set()
"""The files that this process has compared, as they were: the reference or the teacher may be what is trained too."""


def check_files(directory: Path, way_back: str = WAY_BACK) -> bool:
    """Compare all files of a checkpoint that have digests with them; return whether there are any.

    A file that is what this process has compared before is not read again.

    Raises ValueError on all ranks, naming the file that is damaged. Collective.
    """
    message, files = None, None
    rank, ranks = _place()
    try:
        if (listed := digests.read(directory)) is not None:
            files = listed.files
            found = {name: (directory / name).stat() for name in files}
            largest_first = sorted(files, key=lambda name: (-found[name].st_size, name))
            own = {name: _state(directory / name, found[name], files[name]) for name in largest_first[rank::ranks]}
            digests.check(directory, files, [name for name, state in own.items() if state not in _compared])
            _compared.update(own.values())
    except (OSError, ValueError) as e:
        message = f"checkpoint {directory} cannot be read, a file of it is damaged or cut off: {e}. {way_back}"
    if message := first_error(message):
        raise ValueError(message)
    return files is not None


def write_digests(
    directory: Path, computed: Mapping[str, str] = MappingProxyType({}), beside: Iterable[str] = (), pattern: str = "*"
) -> None:
    """Note the digests of the files in ``directory``: those that ranks have ``computed`` while writing, and the rest.

    ``beside``: files that belong to the checkpoint and are checked by who reads them. ``pattern``: of the rest.

    Raises RuntimeError on all ranks when a file cannot be read back. Collective.
    """
    found = {name: one for part in gather_from_world(dict(computed)) for name, one in part.items()}
    rank, ranks = _place()
    message, names, own = None, [], {}
    try:
        files = [path for path in directory.rglob(pattern) if path.is_file()] if rank == 0 else []
        names = sorted({str(path.relative_to(directory)) for path in files} - found.keys())
    except OSError as e:
        message = f"{directory} cannot be read back: {e}"
    rest = gather_from_world(names)[0]
    try:
        own = {name: digests.digest(directory / name) for name in rest[rank::ranks]}
    except OSError as e:
        message = f"{directory} cannot be read back: {e}"
    for part in gather_from_world(own):
        found.update(part)
    if rank == 0 and message is None:
        try:
            digests.write(directory, found, beside)
        except OSError as e:
            message = f"the digests of {directory} cannot be written: {e}"
    if message := first_error(message):
        raise RuntimeError(message)


def _state(path: Path, found: os.stat_result, digest: str) -> tuple[str | int, ...]:
    """Return what is another after any write to the file, and where another digest is wanted."""
    times = found.st_mtime_ns, found.st_ctime_ns
    return os.path.abspath(path), found.st_dev, found.st_ino, found.st_size, *times, digest


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
