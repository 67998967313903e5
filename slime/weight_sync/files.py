"""Weights through files, whole or as changes since what all engines have: the trainers' half.

The hosts' half is ``slime.weights.delta.host_copy``, the engines' ``steps.load_files``. Source ranks keep the weights
of their stage as all engines confirmed them last, in host memory, and compare with them. What is published but not
confirmed is kept as changes, and applied to that copy once it is.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights import export_hf
from slime.backends.megatron_utils.weights.export import described_weights
from slime.backends.megatron_utils.weights.naming import model_family
from slime.backends.megatron_utils.weights.untrained import copies_of
from slime.servers.types import EngineInfo
from slime.utils.atomic_file import sync
from slime.utils.digests import digest
from slime.utils.misc import load_function
from slime.weight_sync.comparing import host_bytes, in_threads
from slime.weight_sync.fanout import WeightSyncError, attempt
from slime.weight_sync.quantized import quantizer_of, weights_to_push
from slime.weight_sync.transport import TrainerLayout, WeightSource, drain
from slime.weights import versions
from slime.weights.delta.codec import WHOLE_ABOVE, Array, Encoded, apply, checksum, encode
from slime.weights.delta.manifest import Entry, Manifest, Payload, Version, state_of
from slime.weights.hf.safetensors_header import read_header

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """Change of one tensor: its encoded changes and the checksum of its new content."""

    name: str
    encoded: Encoded
    sum: str


@dataclass
class Pending:
    """A version that is published, and what leads to it from the base; ``changes`` is None for a whole one."""

    version: Version
    sums: dict[str, str]
    changes: list[Change] | None


@dataclass
class DeltaWriter:
    """One per trainer rank; every method is collective, and all ranks decide alike.

    Attributes:
        density: bytes of the elements that changed in the last version, of all; 1 for a whole one.
        wire_bytes: bytes of its files of weights.
    """

    args: Args
    density: float = 1.0
    wire_bytes: int = 0
    _run: str = ""
    _base: Version | None = None
    """The version that all engines confirmed last, and that ``_content`` holds."""
    _chain: list[int] = field(default_factory=list)
    """The versions that lead to the base, the whole one first."""
    _entries: dict[str, Entry] = field(default_factory=dict)
    """The tensors of the whole version that the chain begins with, on every rank."""
    _sums: dict[str, str] = field(default_factory=dict)
    _copies: dict[str, list[str]] = field(default_factory=dict)
    """Tensor -> those of the checkpoint that repeat it."""
    _content: dict[str, Array] = field(default_factory=dict)
    """On source ranks: name -> uint8 [bytes]."""
    _pending: Pending | None = None

    def begin(self, confirmed: int | None) -> list[int]:
        """Continue from version ``confirmed``, which all engines have; return the versions that must stay on the disk.

        From any but the last published one or its base only a whole version leads on.
        """
        pending, self._pending = self._pending, None
        base, self._base = self._base, None  # while its content changes
        if pending is not None and pending.version.number == confirmed:
            if pending.changes is None:
                self._chain = []
            for change in pending.changes or ():
                self._apply(change)
            self._base, self._sums = pending.version, pending.sums
            self._chain.append(pending.version.number)
        elif base is not None and base.number == confirmed:
            self._base = base
        if self._base is None:
            self._content, self._chain = {}, []
        return self._chain

    def _apply(self, change: Change) -> None:
        entry = self._entries[change.name]
        xor = self.args.update_weight_delta_encoding == "xor"
        apply(change.encoded.payload, change.encoded.form, self._content[change.name], entry.itemsize, xor=xor)

    def write(self, source: WeightSource, staging: Path, number: int) -> bool:
        """Write the changes since the base to ``staging``; False, and nothing is written, where a whole one is due."""
        interval = self.args.update_weight_delta_full_interval
        if self._base is None or len(self._chain) >= interval:
            return False
        attempt(partial(_on_first_rank, _begin_staging, staging))
        changes: list[Change] = []
        payloads: dict[str, Payload] = {}
        attempt(lambda: self._write_changes(source, staging, changes, payloads))
        parts = gather_from_world({change.name: (change.sum, payloads[change.name]) for change in changes})
        changed = gather_from_world(sum(c.encoded.changed * self._entries[c.name].itemsize for c in changes))
        self.density = sum(changed) / max(1, sum(entry.bytes for entry in self._entries.values()))
        if self.density > WHOLE_ABOVE:
            attempt(partial(_on_first_rank, shutil.rmtree, staging))
            return False
        self.wire_bytes = sum(payload.bytes for part in parts for _, payload in part.values())
        found = {name: one for part in parts for name, one in part.items()}
        entries = {
            name: replace(self._entries[name], sum=checked, payload=payload)
            for original, (checked, payload) in found.items()
            for name in (original, *self._copies.get(original, ()))
        }
        sums = {**self._sums, **{name: entry.sum for name, entry in entries.items()}}
        version = Version(self._run, number, state_of(sums))
        self._write_manifest(staging, Manifest(version, self._base, *self._formats, entries))
        self._pending = Pending(version, sums, changes)
        return True

    def wrote_whole(self, source: WeightSource, staging: Path, number: int) -> None:
        """Describe the whole version in ``staging``, and keep its content to compare later ones with."""
        self._base, self._content = None, {}  # room for what is read
        files = sorted(staging.glob("*.safetensors"))
        mine: dict[str, Entry] = {}
        attempt(lambda: mine.update(self._read_entries(files[dist.get_rank() :: dist.get_world_size()])))
        gathered = gather_from_world((mine, uuid.uuid4().hex))
        self._run = self._run or gathered[0][1]
        self._entries = {name: entry for part, _ in gathered for name, entry in part.items()}
        self._copies = self._find_copies()
        sums = {name: entry.sum for name, entry in self._entries.items()}
        version = Version(self._run, number, state_of(sums))
        self._write_manifest(staging, Manifest(version, None, *self._formats, self._entries))
        if TrainerLayout.current().is_source:
            attempt(lambda: self._read_content(source, staging))
        else:
            attempt(lambda: None)
        self.density, self.wire_bytes = 1.0, sum(entry.bytes for entry in self._entries.values())
        self._pending = Pending(version, sums, None)

    @property
    def _formats(self) -> tuple[str, str]:
        return self.args.update_weight_delta_encoding, self.args.update_weight_delta_checksum

    def _write_manifest(self, staging: Path, manifest: Manifest) -> None:
        def write() -> None:
            manifest.write(staging)
            for path in staging.iterdir():
                sync(path)
            sync(staging)

        attempt(partial(_on_first_rank, write))

    def _read_entries(self, files: list[Path]) -> Iterator[tuple[str, Entry]]:
        for path in files:
            content = np.memmap(path, np.uint8, "r")
            for name, span in read_header(path)[0].items():
                found = checksum(content[span.offset : span.offset + span.nbytes].data, self._formats[1])
                yield name, Entry(path.name, span.offset, span.nbytes, found, span.dtype, span.shape, span.itemsize)

    def _find_copies(self) -> dict[str, list[str]]:
        copies: dict[str, list[str]] = {}
        if self.args.mtp_num_layers:
            found = copies_of(Path(self.args.hf_checkpoint), model_family(self.args), self._entries)
            for name, original in found.items():
                copies.setdefault(original, []).append(name)
        return copies

    def _read_content(self, source: WeightSource, staging: Path) -> None:
        """Read the weights of this stage back: what the hosts have, to the bit."""
        for name, _, _ in described_weights(source.model, source.args, quantizer_of(source.args)):
            entry = self._entries[name]
            self._content[name] = np.fromfile(staging / entry.file, np.uint8, entry.bytes, offset=entry.offset)

    def _write_changes(
        self, source: WeightSource, staging: Path, changes: list[Change], payloads: dict[str, Payload]
    ) -> None:
        """On source ranks, compare the stage's weights and write what changed to one file; drain the stream on all."""
        weights = weights_to_push(source)
        try:
            if TrainerLayout.current().is_source:
                name = f"delta-{dist.get_rank():05d}.bin"
                with open(staging / name, "wb") as file:
                    contents = ((name, host_bytes(tensor)) for name, tensor in weights)
                    for change in in_threads(contents, self._compare):
                        payload = change.encoded.payload
                        payloads[change.name] = Payload(name, file.tell(), len(payload), change.encoded.form)
                        file.write(payload)
                        changes.append(change)
        finally:
            drain(weights)  # the gathers need every rank, also those whose disk is full

    def _compare(self, named: tuple[str, Array]) -> Change | None:
        name, content = named
        entry, before = self._entries[name], self._content[name]
        if content.size != before.size:
            raise WeightSyncError(f"{name} had {before.size} bytes when all was written, and has {content.size} now")
        encoding, kind = self._formats
        encoded = encode(content, before, entry.itemsize, xor=encoding == "xor")
        return None if encoded is None else Change(name, encoded, checksum(content.data, kind))


def _begin_staging(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()


def _on_first_rank(action: Callable[..., object], *arguments: object) -> None:
    if dist.get_rank() == 0:
        action(*arguments)


def publish(
    args: Args,
    source: WeightSource,
    version: int,
    engines: Sequence[EngineInfo],
    *,
    delta: DeltaWriter | None = None,
    confirmed: int | None = None,
) -> Path:
    """Write the weights as version ``version`` below ``--update-weight-disk-dir``; return its directory.

    Collective over the trainer. With ``delta`` it holds what changed since version ``confirmed``, which all engines
    have, or everything where that is due. The directory appears when it is complete; versions of earlier runs, or of
    earlier pushes that engines have read, are removed before (not those that ``delta`` builds on), unless
    ``--update-weight-disk-keep-files``. Then every rank calls the hook ``--custom-update-weight-post-write-path`` with
    ``(args, directory, engines)``. Raises WeightSyncError or RuntimeError on every rank when one of them fails.
    """
    final = versions.version_dir(args.update_weight_disk_dir, version)
    staging = versions.staging_dir(final)
    needed: list[Path] = []
    if delta is not None:
        root = args.update_weight_disk_dir
        attempt(lambda: needed.extend(versions.version_dir(root, number) for number in delta.begin(confirmed)))
    attempt(partial(_on_first_rank, _clear, args, needed))
    if delta is None or not delta.write(source, staging, version):
        export_hf(source.model, source.args, staging, quantizer=quantizer_of(source.args))
        if args.update_weight_local_checkpoint_dir is not None:
            _write_checksums(staging)
        if delta is not None:
            delta.wrote_whole(source, staging, version)
    attempt(partial(_on_first_rank, versions.replace, staging, final))
    if args.custom_update_weight_post_write_path is not None:
        attempt(partial(_call_hook, args, final, engines))
    return final


def _clear(args: Args, needed: Sequence[Path]) -> None:
    root = Path(args.update_weight_disk_dir)
    root.mkdir(parents=True, exist_ok=True)
    if not args.update_weight_disk_keep_files:
        versions.clear(root, but=needed)


def _write_checksums(directory: Path) -> None:
    """Each rank reads its share of the files back; rank 0 writes the sums of all."""
    own: dict[str, str] = {}

    def read() -> None:
        mine = sorted(directory.iterdir())[dist.get_rank() :: dist.get_world_size()]
        own.update({path.name: digest(path) for path in mine})

    attempt(read)
    everything = {name: value for part in gather_from_world(own) for name, value in part.items()}
    attempt(partial(_on_first_rank, versions.write_checksums, directory, everything))


def _call_hook(args: Args, directory: Path, engines: Sequence[EngineInfo]) -> None:
    flag, path = "--custom-update-weight-post-write-path", args.custom_update_weight_post_write_path
    try:
        load_function(path, flag)(args, str(directory), list(engines))
    except Exception as e:
        raise WeightSyncError(f"{flag} {path}: {type(e).__name__}: {e}") from e
