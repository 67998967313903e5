"""Argument lists of installed packages, read once per version.

Importing SGLang takes 8 s and Megatron 4 s, so their arguments are read in a helper process and kept as JSON: the
lists of the pinned versions ship with slime, those of other versions and of checkouts are cached under
``$XDG_CACHE_HOME/slime``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from slime.arguments.passthrough.reading import UnreadableArguments, read_installed
from slime.arguments.passthrough.source import (
    MEGATRON,
    MEGATRON_LM,
    ROUTER,
    SGLANG,
    SOURCES,
    Source,
    identity,
    installed_version,
    readers_digest,
)
from slime.utils import atomic_file

__all__ = [
    "MEGATRON",
    "MEGATRON_LM",
    "ROUTER",
    "SGLANG",
    "SOURCES",
    "Source",
    "cache_directory",
    "installed_version",
    "read_installed",
    "records",
    "records_or_reason",
    "shipped_list",
    "version_words",
    "write_atomically",
]

Records = list[dict[str, Any]]
_kept: dict[str, Records] = {}  # lists of this process that could not be cached


def records(source: Source) -> Records:
    """The records of the installed version; of the pinned one when the package is not installed here (a head node).

    Raises ``UnreadableArguments``, an ``ArgumentError``, when they cannot be read.
    """
    version = identity(source) or source.pinned
    if version is not None and version == source.pinned:
        return json.loads(shipped_list(source).read_text())
    name = f"{source.package}-{version}-{readers_digest()}.json"
    cached = _cache_file(name)
    found = _read_cached(cached) or _kept.get(name)
    if found is None:
        print(f"slime: reading the arguments of {source.package} {version}, once (seconds)", file=sys.stderr)
        found = read_installed(source)
        if cached is None or not write_atomically(cached, json.dumps(found)):
            _kept[name] = found
    return found


def records_or_reason(source: Source) -> Records | str:
    """The records, or why they cannot be read; the reason is cached too, until something else is installed."""
    cached = _cache_file(f"{source.package}-{identity(source)}-{readers_digest()}.reason.json")
    reason = _read_cached(cached)
    if reason and "reason" in reason[0]:
        return str(reason[0]["reason"])
    try:
        return records(source)
    except UnreadableArguments as error:
        if cached is not None:
            write_atomically(cached, json.dumps([{"reason": error.reason}]))
        return error.reason


def version_words(source: Source) -> str:
    """The version whose flags are offered, for messages."""
    version = identity(source)
    return version if version is not None else f"{source.pinned} (it is not installed here)"


def shipped_list(source: Source) -> Path:
    """Where the records of the pinned version are."""
    return Path(__file__).parent / "shipped" / f"{source.package}-{source.pinned}.json"


def cache_directory() -> Path | None:
    """Where lists of versions other than the pinned ones are kept; None for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        return None
    return Path(base) / "slime" / "arguments"


def write_atomically(path: Path, text: str) -> bool:
    """Write beside ``path`` and rename; False, and a line on stderr, when it cannot be: that only costs time."""
    try:
        atomic_file.write_atomically(path, text)
    except OSError as error:
        print(f"slime: cannot cache the argument list in {error.strerror}", file=sys.stderr)
        return False
    return True


def _cache_file(name: str) -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / name


def _read_cached(path: Path | None) -> Records | None:
    """The records in ``path``; None when it is not there, or is not what was written (it is then written again)."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_list = isinstance(found, list) and all(isinstance(record, dict) for record in found)
    return found if is_list else None
