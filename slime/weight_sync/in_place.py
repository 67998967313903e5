"""Changes alone to engines in memory (``--update-weight-mode delta`` without files): the trainers' half.

The engines' half is ``slime_engine_plugin.weights.changes``. Source ranks keep the weights of their stage as all
engines confirmed them last, in host memory, compare with them while the engines generate, and broadcast what has
changed over the process group that carries all weights otherwise.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.servers.engine_client import EngineClient
from slime.servers.types import EngineInfo
from slime.utils import accelerator
from slime.weight_sync.buckets import Bucket, kept_together
from slime.weight_sync.comparing import host_bytes, in_threads
from slime.weight_sync.distributed import DistributedTransport
from slime.weight_sync.fanout import WeightSyncError, attempt
from slime.weight_sync.quantized import weights_to_push
from slime.weight_sync.transport import WeightSource, drain
from slime.weights.delta.codec import WHOLE_ABOVE, Array, apply, checksum, encode
from slime.weights.delta.manifest import Version, state_of
from slime.weights.delta.message import DTYPE, Message, Part, PartForm

logger = logging.getLogger(__name__)


class Weight(NamedTuple):
    """A tensor on its way: what it is, and its bytes."""

    part: Part
    content: Array


class Change(NamedTuple):
    """A tensor of a unit in which something has changed; ``changed`` of its bytes have, ``sum`` is that of all."""

    part: Part
    payload: bytes
    changed: int
    sum: str


@dataclass
class Prepared:
    """Changes from the base to the present weights: ``state`` names the latter, ``units`` are those of this stage."""

    state: str
    sums: dict[str, str]
    units: list[list[Change]] = field(default_factory=list)


class InPlaceTransport(DistributedTransport):
    """Sends changes since what all engines have confirmed; all weights where they have not, or where that is due.

    An engine takes changes only for the weights that it has, to the bit, and refuses others: then, too, all engines are
    sent all weights. An engine whose model cannot take changes ends the sending of changes for good.

    Attributes:
        density: bytes of the elements that changed in the last push, of all; 1 where all weights were sent.
    """

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.density = 1.0
        self._run = ""
        self._engines: list[EngineInfo] = []
        self._holders: set[EngineInfo] = set()
        self._base: Version | None = None
        """The version that ``_holders`` confirmed last, and that ``_content`` holds."""
        self._since_full = 0
        self._takes_changes = True
        self._sums: dict[str, str] = {}
        """Of all stages."""
        self._content: dict[str, Weight] = {}
        """On source ranks: the weights of the stage."""
        self._prepared: Prepared | None = None

    def connect(self, engines: Sequence[EngineInfo], clients: Sequence[EngineClient]) -> None:
        self._engines = list(engines)
        super().connect(engines, clients)

    def prepare(self, source: WeightSource) -> None:
        """Compare the weights with those that all engines have."""
        self._prepared = None
        due = self._since_full >= self.args.update_weight_delta_full_interval
        if self._base is None or due or not set(self._engines) <= self._holders:
            return
        units: list[list[Change]] = []
        attempt(lambda: self._compare_stage(source, units))
        changes = [change for unit in units for change in unit]
        size = sum(weight.content.size for weight in self._content.values())
        mine = {change.part.name: change.sum for change in changes}
        stages = gather_from_world((mine, sum(change.changed for change in changes), size))
        self.density = sum(changed for _, changed, _ in stages) / max(1, sum(size for *_, size in stages))
        if self.density <= WHOLE_ABOVE:
            sums = self._sums | {name: one for part, *_ in stages for name, one in part.items()}
            self._prepared = Prepared(state_of(sums), sums, units)

    def send(self, source: WeightSource, *, weight_version: str) -> int:
        prepared, self._prepared = self._prepared, None
        base, self._base = self._base, None  # while engines may have one or the other
        if prepared is not None:
            assert base is not None
            try:
                return self._send_changes(prepared, base, weight_version)
            except WeightSyncError as e:
                if not e.data.get("refused"):
                    raise
                logger.warning("sending all weights: %s", e)
        return self._send_all(source, weight_version)

    def _send_changes(self, prepared: Prepared, base: Version, weight_version: str) -> int:
        target = Version(self._run, int(weight_version), prepared.state)
        sent: list[int] = []
        for stage in range(self.layout.pp_size):
            attempt(partial(self._send_stage_changes, stage, prepared, base, target, sent))
        for change in (change for unit in prepared.units for change in unit if change.part.form != "same"):
            content, form = self._content[change.part.name].content, change.part.form
            apply(change.payload, form, content, _dtype(change.part).itemsize, xor=False)
        self._confirm(target, prepared.sums)
        self._since_full += 1
        return sum(sent)

    def _send_stage_changes(
        self, stage: int, prepared: Prepared, base: Version, target: Version, sent: list[int]
    ) -> None:
        if self._group is None or self.layout.pp_rank != stage:
            return
        batches = list(_batches(prepared.units, self.args.update_weight_buffer_size))
        for number, batch in enumerate(batches):
            first = stage == 0 and number == 0
            last = stage == self.layout.pp_size - 1 and number == len(batches) - 1
            message = Message(target, base, first, last, [change.part for change in batch])
            data = message.pack([change.payload for change in batch])
            self._broadcast(data, str(target.number) if last else None)
            sent.append(len(data))

    def _broadcast(self, data: bytearray, weight_version: str | None) -> None:
        assert self._group is not None
        tensor = torch.frombuffer(data, dtype=torch.uint8).to(accelerator.current_device())
        bucket = Bucket(((DTYPE, tensor),), is_last=weight_version is not None)
        self._group.send(bucket, weight_version=weight_version, as_dtype=DTYPE)

    def _send_all(self, source: WeightSource, weight_version: str) -> int:
        """Send all weights and keep a copy of them; let the engines note which they are."""
        self._content = {}
        sent = super().send(source, weight_version=weight_version)
        self.density = 1.0
        if not self._takes_changes:
            return sent
        mine = {name: checksum(weight.content.data, self._kind) for name, weight in self._content.items()}
        parts = [weight.part for weight in self._content.values()]
        stages = gather_from_world((mine, parts, uuid.uuid4().hex))
        self._run = self._run or stages[0][2]
        sums = {name: one for part, *_ in stages for name, one in part.items()}
        target = Version(self._run, int(weight_version), state_of(sums))
        note = Message(target, None, True, True, [part for _, parts, _ in stages for part in parts])
        try:
            attempt(partial(self._note, note))
        except WeightSyncError as e:
            if not e.data.get("refused"):
                raise
            logger.warning("all weights are sent in every push, since an engine cannot take changes: %s", e)
            self._takes_changes, self._content = False, {}
            return sent + super().send(source, weight_version=weight_version)  # what was tried may have broken them
        self._confirm(target, sums)
        self._since_full = 1
        return sent

    def _note(self, message: Message) -> None:
        if self._group is not None and self.layout.pp_rank == 0:
            self._broadcast(message.pack([]), None)

    def _confirm(self, version: Version, sums: dict[str, str]) -> None:
        self._base, self._sums, self._holders = version, sums, set(self._engines)

    @property
    def _kind(self) -> str:
        kind: str = self.args.update_weight_delta_checksum
        return kind

    def _weights(self, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super()._weights(source):
            if self._takes_changes:
                self._content[name] = Weight(_same(name, tensor), np.array(host_bytes(tensor)))
            yield name, tensor

    def _compare_stage(self, source: WeightSource, units: list[list[Change]]) -> None:
        """On source ranks, compare the weights of the stage; drain the stream on all."""
        weights = weights_to_push(source)
        try:
            if self._group is not None:
                together = (
                    [Weight(_same(name, tensor), host_bytes(tensor)) for name, tensor in unit]
                    for unit in kept_together(weights)
                )
                units.extend(in_threads(together, self._compare))
        finally:
            drain(weights)

    def _compare(self, unit: list[Weight]) -> list[Change] | None:
        """Return what became of tensors that are loaded together; None where nothing did."""
        encoded = []
        for part, content in unit:
            before = self._content[part.name]
            if (part, content.size) != (before.part, before.content.size):
                raise WeightSyncError(f"{part.name} was {before.part} when all weights were sent, and is {part} now")
            encoded.append(encode(content, before.content, _dtype(part).itemsize, xor=False))
        if not any(encoded):
            return None
        plain = any(one.all_ones for one in encoded if one is not None)
        changes = []
        for (part, content), one in zip(unit, encoded, strict=True):
            changed = 0 if one is None else one.changed * _dtype(part).itemsize
            form: PartForm = "same" if one is None else one.form
            payload = b"" if one is None else one.payload
            if plain:
                form, payload = "whole", content.tobytes()
            described = replace(part, form=form, plain=plain, bytes=len(payload))
            changes.append(Change(described, payload, changed, checksum(content.data, self._kind)))
        return changes


def _same(name: str, tensor: torch.Tensor) -> Part:
    return Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), "same")


def _dtype(part: Part) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def _batches(units: list[list[Change]], limit_bytes: int) -> Iterator[list[Change]]:
    """Yield what travels together, of at most ``limit_bytes`` unless one unit has more; one at least, of nothing."""
    batch: list[Change] = []
    size = 0
    for unit in units:
        more = sum(len(change.payload) for change in unit)
        if batch and size + more > limit_bytes:
            yield batch
            batch, size = [], 0
        batch = batch + unit
        size += more
    yield batch
