"""Manifest of a version of the weights: ``manifest.json`` beside its files.

A version is whole (``base`` is null; a Hugging Face checkpoint) or the changes from its base. Its *state* is one digest
over the checksums of all tensors, so that a copy proves by name that it holds the content which changes were made from,
from any run, machine or earlier attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from slime.utils.atomic_file import write_atomically

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Version:
    """Push ``number`` of ``run``, after which the weights are those of ``state``."""

    run: str
    number: int
    state: str

    def __str__(self) -> str:
        return f"{self.number} of run {self.run[:8]} (state {self.state[:8]})"


@dataclass(frozen=True)
class Payload:
    """Place of the changes of a tensor: ``bytes`` from ``offset`` of ``file`` on, in the ``form`` of the codec."""

    file: str
    offset: int
    bytes: int
    form: str


@dataclass(frozen=True)
class Entry:
    """One tensor of the checkpoint: its place in the whole one, and the checksum of its content in this version.

    ``dtype`` and ``shape`` are those of the safetensors header (``BF16``), ``itemsize`` counts bytes of an element.
    """

    file: str
    offset: int
    bytes: int
    sum: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    payload: Payload | None = None


@dataclass(frozen=True)
class Manifest:
    """``encoding``: ``xor`` or ``overwrite``; ``tensors``: all of a whole version, otherwise those that changed."""

    version: Version
    base: Version | None
    encoding: str
    checksum: str
    tensors: Mapping[str, Entry]

    def write(self, directory: Path) -> None:
        """Write it to ``directory``, durably."""
        write_atomically(directory / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}), durable=True)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read that of ``directory``; raises FileNotFoundError, and ValueError naming a file that is none."""
        return cls.parse((directory / MANIFEST).read_text(), directory)

    @classmethod
    def parse(cls, text: str, directory: Path) -> Manifest:
        """Return the manifest ``text`` of ``directory``; raises ValueError naming a file that is none."""
        try:
            found = json.loads(text)
            if found.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            base = found.pop("base")
            tensors = {name: _entry(one) for name, one in found.pop("tensors").items()}
            version = Version(**found.pop("version"))
            return cls(version=version, base=None if base is None else Version(**base), tensors=tensors, **found)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{directory / MANIFEST} is no manifest of weights: {type(e).__name__}: {e}") from e


def _entry(found: dict[str, Any]) -> Entry:
    payload = found.pop("payload")
    shape = tuple(found.pop("shape"))
    return Entry(**found, shape=shape, payload=None if payload is None else Payload(**payload))


def state_of(sums: Mapping[str, str]) -> str:
    """Return the state's name for the checksums of all tensors (name -> hex digits), in any order."""
    digest = xxhash.xxh3_128()
    for name in sorted(sums):
        digest.update(f"{name} {sums[name]}\n".encode())
    return digest.hexdigest()
