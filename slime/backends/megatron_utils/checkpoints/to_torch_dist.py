"""Turn a Hugging Face checkpoint into a Megatron ``torch_dist`` one, on a machine without GPU and without Megatron.

Weights are written one by one, a file per file of the source, and read back. Layers are numbered, not stacked, and
``common.pt`` says so, which is what megatron-core asks for them by. Norms have the names of TransformerEngine's layers.
The vocabulary is not padded: Megatron pads what it reads.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what the format stores of a tensor's place
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime.backends.megatron_utils.checkpoints.convert import Described, described_by, some_of
from slime.backends.megatron_utils.checkpoints.directory import TRACKER
from slime.backends.megatron_utils.checkpoints.torch_dist import TorchDistCheckpoint
from slime.backends.megatron_utils.weights.layouts import Shape
from slime.backends.megatron_utils.weights.load import OneOf, check_copies
from slime.backends.megatron_utils.weights.maps import Rule
from slime.backends.megatron_utils.weights.maps.parts import LM_HEAD
from slime.backends.megatron_utils.weights.maps.rule import EXPERT, LAYER, Place, as_template
from slime.backends.megatron_utils.weights.untrained import extra_layers, mtp_names
from slime.models import hf_fields
from slime.observability.progress import Progress, progress_bar
from slime.utils.atomic_file import sync, write_atomically
from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint, quantization_of, read_config
from slime.weights.quantization import read_format
from slime.weights.quantization.files import Weights, state_of

RELEASE = "release"
"""Megatron-LM's name of a checkpoint of no iteration, of which the weights alone are loaded."""
Places = list[tuple[int, int]]
"""The place where each tensor of a file begins, and its bytes."""
_FUSED_NORM = "layer_norm_weight"
_BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
    "common_backend_version": 1,
}  # fmt: skip
_CONTENT = {"non_homogeneous_layers": True, "singleton_local_shards": False}


@dataclass(frozen=True)
class Entry:
    """A tensor to store under ``key``, or the part of an ``expert`` in it; ``sources`` are what it is made of."""

    key: str
    expert: int | None
    rule: Rule
    sources: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype

    @property
    def offsets(self) -> Shape:
        """Return where it begins in the stored tensor."""
        return (0,) * len(self.shape) if self.expert is None else (self.expert, *(0,) * len(self.shape))

    def tensor(self, weights: Weights, described: Described) -> torch.Tensor:
        """Return what is stored."""
        found = self.rule.layout.shard(_sources(self, weights), 0, 1, described.dims)
        found = found if self.expert is None else found[None]
        # A view would be stored with all that it is a view of.
        return found.contiguous() if found.untyped_storage().nbytes() == found.nbytes else found.clone()


def to_torch_dist(source: Path, target: Path, *, force: bool = False) -> None:
    """Write ``target``, to be given to ``--ref-load`` or ``--load``: the checkpoint ``source`` as a release.

    Quantized weights are written in bf16. MTP layers are part of it, parts that no model here has are not. It appears,
    or with ``force`` replaces an older one, when it is complete; what was killed before continues with the files that
    are missing. Raises FileExistsError for a ``target`` that is there without ``force``, FileNotFoundError for what is
    no checkpoint, and ValueError for one that is damaged, incomplete, or of no family that is known.
    """
    target = Path(os.path.abspath(target))
    hf_writer.check_output(target, force=force, sources={"the checkpoint": source})
    config = read_config(source)
    quantization = quantization_of(config)
    with HfCheckpoint(source) as checkpoint:
        checkpoint.open_all()
        weights = Weights(checkpoint, None if quantization is None else read_format(quantization))
        described = described_by(config)
        check_copies(checkpoint, described.family, mtp_names(checkpoint, described.family))
        files = plan(weights, config, described, source)
        read = sorted({checkpoint.file_of(name) for name in checkpoint.names})
        states = {path.name: state_of(path) for path in read}
        made_of = {"format": "torch_dist", "source": str(source.resolve()), "config": config, "files": states}
        partial = hf_writer.begin(target, made_of)
        directory = partial / RELEASE
        directory.mkdir(exist_ok=True)
        places = []
        try:
            with progress_bar(f"writing {target.name}", total=sum(map(len, files)), unit="weights") as bar:
                for number, entries in enumerate(files):
                    places.append(_written(directory / _file_name(number), entries, weights, described, bar))
        except ValueError:  # of this checkpoint: there is nothing to continue
            shutil.rmtree(partial)
            raise
    _complete(directory, files, places, config, described)
    write_atomically(partial / TRACKER, RELEASE, durable=True)
    hf_writer.publish(partial, target)


def plan(weights: Weights, config: dict[str, Any], described: Described, source: Path) -> list[list[Entry]]:
    """Return what is stored, a list per file of the source.

    Raises ValueError for tensors that have no place in the model, are missing, or have another shape.
    """
    family, extra = described.family, extra_layers(config)
    is_tied = bool(hf_fields.text_part(config).get("tie_word_embeddings"))
    firsts = {False: _by_first_source(family.rules), True: _by_first_source(family.mtp.rules if family.mtp else ())}
    found: list[tuple[str, bool, Rule, Place]] = []
    used: set[str] = set()
    for name in sorted(weights.names):
        place, is_mtp = as_template(name), family.is_mtp_hf(name, extra)
        rule = _rule(firsts[is_mtp].get(place.template, []), place, weights)
        outside = not is_mtp and place.layer is not None and place.layer >= described.num_layers
        if rule is None or outside or (name == LM_HEAD and is_tied):
            continue
        found.append((name, is_mtp, rule, place))
        used.update(rule.hf_names(place.layer, place.expert))
    _check_names(weights, used, described, extra, is_tied, source)
    _check_complete(found, described, is_tied, source)
    in_layer: dict[tuple[bool, int | None], set[str]] = {}
    for _, is_mtp, rule, place in found:
        in_layer.setdefault((is_mtp, place.layer), set()).update(rule.megatron)
    files: dict[Path, list[Entry]] = {}
    for name, is_mtp, rule, place in found:
        layer = place.layer
        if is_mtp:
            layer = (layer or 0) - (described.num_layers if family.mtp and family.mtp.pattern is None else 0)
        key = _key(rule, in_layer[is_mtp, place.layer]).replace(LAYER, str(layer))
        experts = range(described.dims.num_experts) if rule.is_stacked else [place.expert]
        entries = files.setdefault(weights.file_of(name), [])
        entries += [
            _entry(key, expert, rule, tuple(rule.hf_names(place.layer, expert)), weights, described)
            for expert in experts
        ]
    return [files[path] for path in sorted(files)]


def _by_first_source(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.hf[0], []).append(rule)
    return found


def _rule(candidates: Sequence[Rule], place: Place, weights: Weights) -> Rule | None:
    """Return the one of the rules with the same first tensor that a layer follows, the first if it lacks tensors.

    Layers whose values are their keys have a rule that is a part of that of the others, which goes first.
    """
    ordered = sorted(candidates, key=lambda rule: -len(rule.hf))
    whole = (rule for rule in ordered if weights.names >= set(rule.hf_names(place.layer, place.expert)))
    return next(whole, ordered[0] if ordered else None)


def _key(rule: Rule, in_layer: set[str]) -> str:
    """Return the key of the layer's tensor; ``in_layer``: the names of all its parameters.

    TransformerEngine's layers have a norm inside of the linear layer behind it, but for norms before experts, latent
    and linear attention, which have no such layer.
    """
    if rule.with_experts and any(EXPERT in name for name in in_layer):
        return rule.with_experts
    fused = [name for name in rule.megatron if name.endswith(_FUSED_NORM)]
    plain = [name for name in rule.megatron if name not in fused]
    chosen = [name for name in fused if name.removesuffix(_FUSED_NORM) + "weight" in in_layer] or plain
    return chosen[0].replace(".experts.", ".experts.experts.").replace(EXPERT, "")


def _entry(
    key: str, expert: int | None, rule: Rule, sources: tuple[str, ...], weights: Weights, described: Described
) -> Entry:
    seen = [weights.shape(name) for name in sources]
    if rule.is_stacked:
        seen = [shape[1:] for shape in seen]
    try:
        empty = [torch.empty(shape, device="meta") for shape in seen]
        shape = tuple(rule.layout.shard(empty, 0, 1, described.dims).shape)
        expected = [tuple(shape) for shape in rule.layout.hf_shapes(shape, 1, described.dims)]
    except (RuntimeError, IndexError):  # sizes that do not divide
        expected = []
    if expected != seen:
        where = ", ".join(f"{n} {list(s)} (in {weights.file_of(n).name})" for n, s in zip(sources, seen, strict=True))
        wanted = ", ".join(str(list(shape)) for shape in expected) or "sizes that go with heads and groups"
        raise ValueError(f"{where}: expected {wanted}. Does config.json belong to these weights?")
    dtypes = {weights.dtype(name) for name in sources}
    if len(dtypes) > 1:
        raise ValueError(
            f"{', '.join(sources)} are one weight of Megatron's, and have the dtypes {some_of([*map(str, dtypes)])}"
        )
    return Entry(key, expert, rule, sources, shape, dtypes.pop())


def _check_names(
    weights: Weights, used: set[str], described: Described, extra: range, is_tied: bool, source: Path
) -> None:
    family = described.family
    if missing := sorted(used - weights.names):
        raise ValueError(f"{source}: {len(missing)} tensors of the model are missing: {some_of(missing)}")
    unexpected = [
        f"{name} (in {weights.file_of(name).name})"
        for name in sorted(weights.names - used)
        if not family.ignores_hf(name)
        and not (family.carries_hf(name, extra) and not family.knows_hf(name))
        and not (family.is_mtp_hf(name, extra) and family.copy_of(name))
        and not (name == LM_HEAD and is_tied)
    ]
    if unexpected:
        raise ValueError(
            f"{source}: {len(unexpected)} tensors have no place in a model of the family {family.name!r}: "
            f"{some_of(unexpected)}"
        )


def _check_complete(
    found: Sequence[tuple[str, bool, Rule, Place]], described: Described, is_tied: bool, source: Path
) -> None:
    """Raise ValueError unless layers of a kind have the same tensors, each with all experts, and none is missing."""
    once, layers = set(), {i: set[Rule]() for i in range(described.num_layers)}
    experts: dict[tuple[bool, int | None, Rule], set[int]] = {}
    for name, is_mtp, rule, place in found:
        if rule.is_expert and not rule.is_stacked:
            experts.setdefault((is_mtp, place.layer, rule), set()).add(place.expert or 0)
        if place.layer is None:
            once.add(name)
        elif not is_mtp:
            layers[place.layer].add(rule)
    needed = {rule.hf[0] for rule in described.family.rules if LAYER not in rule.hf[0]} - (
        {LM_HEAD} if is_tied else set()
    )
    missing = sorted(needed - once)
    of_kind: dict[tuple[bool, ...], set[Rule]] = {}
    for own in layers.values():
        of_kind.setdefault(_kind(own), set()).update(own)
    for layer, own in layers.items():
        others = of_kind[_kind(own)] if own else set.union(*of_kind.values())
        missing += [rule.hf_names(layer, 0)[0] for rule in described.family.rules if rule in others - own]
    for (_, number, rule), numbers in experts.items():
        missing += [rule.hf_names(number, i)[0] for i in range(described.dims.num_experts) if i not in numbers]
    if missing:
        raise ValueError(f"{source}: {len(missing)} tensors of the model are missing: {some_of(missing)}")


def _kind(rules: set[Rule]) -> tuple[bool, ...]:
    """Return what kind of layer has the weights of ``rules``.

    Whether with linear attention, experts, an indexer, values that are keys.
    """
    parts = (".linear_attn.", ".experts.", ".indexer.", ".linear_qk.")
    return tuple(any(part in rule.megatron[0] for rule in rules) for part in parts)


def _sources(entry: Entry, weights: Weights) -> list[Any]:
    sources = [weights.slice(name) for name in entry.sources]
    return [OneOf(source, entry.expert) for source in sources] if entry.rule.is_stacked else sources


def _file_name(number: int) -> str:
    """Return what PyTorch calls the file of writer ``number``."""
    return f"__{number}_0.distcp"


def _written(path: Path, entries: Sequence[Entry], weights: Weights, described: Described, bar: Progress) -> Places:
    """Write ``path``, or leave it as it is when a note beside it marks it as complete; return what is where."""
    note = path.with_suffix(".places")
    if note.is_file():
        bar.update(len(entries))
        return [(start, length) for start, length in json.loads(note.read_text())]
    places = write_entries(path, entries, weights, described, bar)
    write_atomically(note, json.dumps(places), durable=True)
    return places


def write_entries(
    path: Path, entries: Sequence[Entry], weights: Weights, described: Described, bar: Progress
) -> Places:
    """Write ``path`` and read it back. Raises OSError when that is not what was written."""
    places, sums = [], []
    with path.open("wb") as file:
        for entry in entries:
            tensor = entry.tensor(weights, described)
            start = file.tell()
            torch.save(tensor, file)
            places.append((start, file.tell() - start))
            sums.append(_sum(tensor))
            bar.update()
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        for entry, (start, length), expected in zip(entries, places, sums, strict=True):
            file.seek(start)
            if _sum(torch.load(io.BytesIO(file.read(length)), weights_only=True)) != expected:
                raise OSError(f"{path}: {entry.key} is not what was written; is the disk damaged?")
    return places


def _sum(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
    return xxhash.xxh3_128_digest(tensor.reshape(-1).view(torch.uint8).numpy().data), tensor.dtype, tensor.shape


def _complete(
    directory: Path,
    files: Sequence[Sequence[Entry]],
    places: Sequence[Places],
    config: dict[str, Any],
    described: Described,
) -> None:
    """Write what describes the files, compare what a reader finds with what was planned, and remove the notes."""
    entries = [entry for file in files for entry in file]
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for number, (own, own_places) in enumerate(zip(files, places, strict=True)):
        for entry, place in zip(own, own_places, strict=True):
            size = entry.shape if entry.expert is None else (described.dims.num_experts, *entry.shape)
            properties = TensorProperties(dtype=entry.dtype)
            stored = metadata.setdefault(entry.key, TensorStorageMetadata(properties, torch.Size(size), []))
            part = torch.Size(size if entry.expert is None else (1, *entry.shape))
            stored.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), part))
            index = MetadataIndex(entry.key, torch.Size(entry.offsets), len(stored.chunks) - 1)
            storage[index] = _StorageInfo(_file_name(number), *place)
    nothing = io.BytesIO()
    torch.save([None], nothing)
    last = _file_name(len(files))
    (directory / last).write_bytes(nothing.getvalue())
    for key in _extra_states(entries, described.dims.num_experts):
        metadata[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _StorageInfo(last, 0, len(nothing.getvalue()))
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata(metadata, storage_data=storage)))
    (directory / "metadata.json").write_text(json.dumps(_BACKENDS))
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        "args": _arguments(config, described),
        "content_metadata": _CONTENT,
    }
    torch.save(common, directory / "common.pt")
    for path in directory.iterdir():
        sync(path)
    sync(directory)
    found = {
        (weight.key, weight.index, weight.shape, weight.dtype) for weight in TorchDistCheckpoint(directory).weights
    }
    wanted = {(e.key, () if e.expert is None else (e.expert,), e.shape, e.dtype) for e in entries}
    if found != wanted:
        raise OSError(f"{directory}: {len(found ^ wanted)} weights are not described as written; is the disk damaged?")
    for note in directory.glob("*.places"):
        note.unlink()


def _extra_states(entries: Sequence[Entry], num_experts: int) -> list[str]:
    """Return the keys of the states beside weights that Megatron asks for; without FP8 there is nothing in them.

    The modules that have one depend on the library of the layers: here all have one that may. A state that is not
    asked for does no harm.
    """
    modules: dict[str, bool] = {}
    for entry in entries:
        module, _, kind = entry.key.rpartition(".")
        plain = any(part in module for part in (".linear_attn", ".router"))  # plain PyTorch modules have none
        if entry.key.startswith(("decoder.", "mtp.")) and kind in ("weight", _FUSED_NORM) and not plain:
            modules[module] = entry.expert is not None
            if module.endswith(".self_attention.linear_proj"):
                modules[module.removesuffix("linear_proj") + "core_attention"] = False
    return [
        f"{module}._extra_state/shard_{number}_{count}"
        for module, is_experts in modules.items()
        for count in [num_experts if is_experts else 1]
        for number in range(count)
    ]


def _arguments(config: dict[str, Any], described: Described) -> Namespace:
    """Return what Megatron-LM compares with its flags, or asks of a checkpoint, by the names of its flags."""
    dims, text = described.dims, hf_fields.text_part(config)
    return Namespace(
        num_layers=described.num_layers,
        hidden_size=text["hidden_size"],
        num_attention_heads=dims.num_attention_heads,
        group_query_attention=dims.num_query_groups != dims.num_attention_heads,
        num_query_groups=dims.num_query_groups,
        kv_channels=dims.kv_channels,
        num_experts=dims.num_experts or None,
        padded_vocab_size=dims.vocab_size,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
