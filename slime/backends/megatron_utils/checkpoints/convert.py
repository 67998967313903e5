"""Turn a Megatron ``torch_dist`` checkpoint into a Hugging Face one, on a machine without GPU and without Megatron."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.checkpoints.torch_dist import StoredWeight, TorchDistCheckpoint
from slime.backends.megatron_utils.weights.layouts import Dims, Shape
from slime.backends.megatron_utils.weights.maps import Family, Rule, family_of
from slime.backends.megatron_utils.weights.naming import MTP, hf_place
from slime.backends.megatron_utils.weights.untrained import carried_names, copy_tensors, write_copies
from slime.models import hf_fields
from slime.models.layer_attention import layer_attention, shared_heads
from slime.models.shape import gated_delta_net
from slime.observability.progress import progress_bar
from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint, read_config

logger = logging.getLogger(__name__)

MAX_LISTED = 5
FP8_SCALE = "_scale_inv"


@dataclass(frozen=True)
class Conversion:
    """Settings of a conversion: the flags of ``tools/convert_torch_dist_to_hf.py``.

    ``readers`` shards are put together and ``writers`` shards written at a time; memory is that many shards of
    ``chunk_bytes``.
    """

    input_dir: Path
    output_dir: Path
    origin_hf_dir: Path | None = None
    model_name: str | None = None
    vocab_size: int | None = None
    add_missing: bool = False
    force: bool = False
    chunk_bytes: int = hf_writer.MAX_SHARD_BYTES
    readers: int = 1
    writers: int = 1


@dataclass(frozen=True)
class Described:
    """Description of the model of a checkpoint's tensors, from the checkpoint's files."""

    family: Family
    dims: Dims
    num_layers: int


@dataclass(frozen=True)
class Unit:
    """A weight and its Hugging Face tensors ``names``, or the weights of all experts that share one."""

    weights: tuple[StoredWeight, ...]
    rule: Rule
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all its tensors."""
        return self.weights[0].dtype

    @property
    def size(self) -> int:
        """Return the bytes of its tensors."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize

    def tensors(self, checkpoint: TorchDistCheckpoint, dims: Dims) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors by name."""
        found = [self.rule.layout.unshard([checkpoint.read(weight)], dims) for weight in self.weights]
        whole = [torch.stack(parts) for parts in zip(*found, strict=True)] if self.rule.is_stacked else found[0]
        return dict(zip(self.names, whole, strict=True))


def convert(conversion: Conversion) -> Path:
    """Write the Hugging Face checkpoint ``conversion.output_dir`` and return it.

    It appears, or with ``force`` replaces an older one, when it is complete. Raises FileNotFoundError for missing
    directories, FileExistsError for an output that is there, and ValueError for a checkpoint that is not complete or
    not of the model that ``origin_hf_dir`` describes.
    """
    out = Path(os.path.abspath(conversion.output_dir))
    sources = {"--input-dir": conversion.input_dir, "--origin-hf-dir": conversion.origin_hf_dir}
    hf_writer.check_output(out, force=conversion.force, sources=sources)
    checkpoint = TorchDistCheckpoint(conversion.input_dir)
    described = _describe(checkpoint, conversion)
    units = plan(checkpoint, described)
    missing = _compare_with_origin(units, conversion, described.family)
    # This tells a conversion that was killed from another one with the same output.
    read = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.path.iterdir())
    fields = {name: str(value) for name, value in vars(conversion).items() if name not in ("readers", "writers")}
    partial = hf_writer.begin(out, {**fields, "checkpoint": str(checkpoint.path), "files": read})
    files = _write_shards(checkpoint, described.dims, units, partial, conversion)
    size = sum(unit.size for unit in units)
    origin = conversion.origin_hf_dir
    if origin is not None:
        if _has_mtp(units):
            copies, more = write_copies(origin, partial, described.family, files)
            files, size, missing = {**files, **copies}, size + more, missing - copies.keys()
        if conversion.add_missing and missing:
            added, more = copy_tensors(origin, partial, missing)
            files, size = {**files, **added}, size + more
        hf_writer.copy_other_files(origin, partial)
        hf_writer.write_dtype(partial, ((shape, unit.dtype) for unit in units for shape in unit.shapes))
        _correct_config(partial, conversion.vocab_size)
    hf_writer.write_index(partial, files, size)
    hf_writer.publish(partial, out)
    return out


def differences(made: Path, origin: Path) -> list[str]:
    """Compare two Hugging Face checkpoints tensor by tensor and return what differs, a line each; [] when all equal."""
    found = []
    with HfCheckpoint(made) as ours, HfCheckpoint(origin) as theirs:
        found += [f"{name} is only in {made}" for name in sorted(ours.names - theirs.names)]
        found += [f"{name} is only in {origin}" for name in sorted(theirs.names - ours.names)]
        for name in sorted(ours.names & theirs.names):
            a, b = ours.slice(name)[:], theirs.slice(name)[:]
            if a.shape != b.shape:
                found.append(f"{name} is {list(a.shape)}, in {origin} {list(b.shape)}")
            elif not torch.equal(a.to(b.dtype), b):
                largest = (a.double() - b.double()).abs().max().item()
                found.append(f"{name} differs by up to {largest:.3g}")
    return found


def _describe(checkpoint: TorchDistCheckpoint, conversion: Conversion) -> Described:
    """Take the model's family and sizes from the config of ``--origin-hf-dir``, else from Megatron-LM's arguments."""
    rows = {w.shape[0] for w in checkpoint.weights if w.name == "embedding.word_embeddings.weight"}
    if conversion.origin_hf_dir is not None:
        found = described_by(read_config(conversion.origin_hf_dir), conversion.model_name)
        vocab = conversion.vocab_size or found.dims.vocab_size
    else:
        if conversion.model_name is None:
            raise ValueError("give --origin-hf-dir (a Hugging Face checkpoint of the same model), or --model-name")
        args = checkpoint.training_args()
        if args is None:
            raise ValueError(
                f"{checkpoint.path / 'common.pt'} holds no arguments of Megatron-LM (slime writes none), so the "
                "number of heads is unknown: give --origin-hf-dir, of which only the config.json is needed"
            )
        family = _family(conversion.model_name)
        heads = args.num_attention_heads
        groups = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
        channels = getattr(args, "kv_channels", None) or args.hidden_size // heads
        vocab = conversion.vocab_size or max(rows, default=0)
        experts = getattr(args, "num_experts", None) or 0
        found = Described(family, Dims(heads, groups, channels, vocab, vocab, experts), args.num_layers)
    if rows and vocab > max(rows):
        raise ValueError(f"{checkpoint.path} has {max(rows)} rows of vocabulary, fewer than the {vocab} asked for")
    return replace(found, dims=replace(found.dims, vocab_size=vocab, padded_vocab_size=max(rows, default=vocab)))


def described_by(whole: dict[str, Any], model_name: str | None = None) -> Described:
    """Return what ``config.json`` says; ``model_name``: of the family, where it is not to be that of the config."""
    config = hf_fields.text_part(whole)
    family = _family(model_name or whole.get("model_type", "missing"))
    heads, vocab = config["num_attention_heads"], config["vocab_size"]
    groups = config.get("num_key_value_heads") or heads
    channels = config.get("head_dim") or config["hidden_size"] // heads
    experts = (hf_fields.experts(config) or ("", 0))[1]
    keys = gated_delta_net(config.get).keys
    shared = shared_heads(layer_attention(config))
    dims = Dims(heads, groups, channels, vocab, vocab, experts, keys, *shared)
    return Described(family, dims, config["num_hidden_layers"])


def _family(name: str) -> Family:
    return family_of(name.lower().removesuffix("config"))


def plan(checkpoint: TorchDistCheckpoint, described: Described) -> list[Unit]:
    """Return what has to be converted, in the order of the layers.

    Raises ValueError for a weight that the family's map does not know, or whose size is not that of the model.
    """
    grouped: dict[object, list[tuple[int, StoredWeight, Rule, tuple[str, ...]]]] = {}
    for weight in checkpoint.weights:
        rule, layer, expert, names = hf_place(weight.name, described.family, described.num_layers)
        key = (rule.hf, layer) if rule.is_stacked else weight.name
        grouped.setdefault(key, []).append((expert or 0, weight, rule, names))
    units = []
    for members in grouped.values():
        members.sort(key=lambda member: member[0])  # the experts of a stack
        _, weight, rule, names = members[0]
        shapes = rule.layout.hf_shapes(weight.shape, 1, described.dims)
        _check_size(checkpoint, weight, shapes, names, described.dims)
        if rule.is_stacked:
            shapes = [(len(members), *shape) for shape in shapes]
        weights = tuple(weight for _, weight, _, _ in members)
        units.append(Unit(weights, rule, names, tuple(tuple(shape) for shape in shapes)))
    return sorted(units, key=lambda unit: _order(unit.weights[0].name))


def _order(name: str) -> tuple[int, list[int], str]:
    """Embedding, layers by number, what comes after them, MTP layers."""
    part = next((i for i, start in enumerate(("embedding.", "decoder.layers.")) if name.startswith(start)), 2)
    return part + name.startswith(MTP), [int(word) for word in name.split(".") if word.isdigit()], name


def _check_size(
    checkpoint: TorchDistCheckpoint, weight: StoredWeight, shapes: Sequence[Shape], names: Sequence[str], dims: Dims
) -> None:
    wanted = sum(torch.Size(shape).numel() for shape in shapes)
    rows = weight.shape[0] if weight.shape else 1
    stored = torch.Size(weight.shape).numel()
    is_vocabulary = shapes[0][0] == dims.vocab_size and len(shapes) == 1 and rows >= dims.vocab_size
    if wanted != stored and not is_vocabulary:
        raise ValueError(
            f"{checkpoint.path}: {weight.name} is {list(weight.shape)}, expected {', '.join(names)} of shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}. Is --origin-hf-dir the model that was trained? A "
            "critic (output_layer with one row) has no Hugging Face form"
        )


def _compare_with_origin(units: Sequence[Unit], conversion: Conversion, family: Family) -> set[str]:
    """Return the tensors that the origin has and the checkpoint lacks. Raises ValueError for another model's."""
    origin = conversion.origin_hf_dir
    if origin is None or not any(origin.glob("*.safetensors")):
        if conversion.add_missing:
            raise ValueError(
                f"--add-missing-from-origin-hf needs the weights of --origin-hf-dir, and {origin} has none"
            )
        return set()
    written = {name: shape for unit in units for name, shape in zip(unit.names, unit.shapes, strict=True)}
    method = (hf_fields.text_part(read_config(origin)).get("quantization_config") or {}).get("quant_method")
    with HfCheckpoint(origin) as checkpoint:
        scales = {n for n in checkpoint.names if n.endswith(FP8_SCALE) and n.removesuffix(FP8_SCALE) in written}
        missing = set(checkpoint.names) - written.keys() - scales
        if method not in (None, "fp8"):  # its weights go by other names
            return {name for name in missing if name in carried_names(checkpoint, family)}
        wrong = [
            f"{name} {list(shape)}" + (f" (there {_shape(checkpoint, name)})" if name in checkpoint.names else "")
            for name, shape in written.items()
            if name not in checkpoint.names or not _fits(shape, _shape(checkpoint, name), conversion.vocab_size)
        ]
        if wrong:
            raise ValueError(f"the weights are not those of {origin}, which has no {some_of(wrong)}")
        carried = carried_names(checkpoint, family)
        needed = {n for n in missing - carried if not family.ignores_hf(n)}
    if needed and not conversion.add_missing:
        raise ValueError(
            f"{conversion.input_dir} lacks {len(needed)} tensors of {origin}: {some_of(sorted(needed))}. "
            "--add-missing-from-origin-hf takes them from there"
        )
    repeated = {name for name in missing if family.copy_of(name)} if _has_mtp(units) else set()  # they are written
    if (left_out := missing - repeated) and not conversion.add_missing:
        logger.warning(
            "%d tensors of %s are not in the checkpoint and are left out (%s); --add-missing-from-origin-hf adds them",
            len(left_out), origin, some_of(sorted(left_out)),
        )  # fmt: skip
    return missing


def _has_mtp(units: Sequence[Unit]) -> bool:
    return any(weight.name.startswith(MTP) for unit in units for weight in unit.weights)


def _shape(checkpoint: HfCheckpoint, name: str) -> list[int]:
    return list(checkpoint.slice(name).get_shape())


def _fits(shape: Shape, there: Sequence[int], vocab_size: int | None) -> bool:
    return list(shape) == list(there) or (vocab_size is not None and list(shape) == [vocab_size, *there[1:]])


def some_of(items: Sequence[str]) -> str:
    """Return the first of ``items``, and how many more there are."""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(items[:MAX_LISTED]) + more


def _write_shards(
    checkpoint: TorchDistCheckpoint, dims: Dims, units: Sequence[Unit], partial: Path, conversion: Conversion
) -> dict[str, str]:
    """Write all units and return tensor name -> file."""
    shards = list(_shards(units, conversion.chunk_bytes))
    room = threading.Semaphore(conversion.readers + conversion.writers)  # shards in memory
    total = sum(len(shard) for shard in shards)
    with (
        progress_bar(f"writing {conversion.output_dir.name}", total=total, unit="weights") as bar,
        ThreadPoolExecutor(conversion.writers, "write") as writers,
        ThreadPoolExecutor(conversion.readers, "read") as readers,
    ):

        def read(number: int) -> Future[list[str]]:
            if (partial / hf_writer.shard_name(number + 1, len(shards))).is_file():  # of a conversion that was killed
                bar.update(len(shards[number]))
                return writers.submit(lambda: [name for unit in shards[number] for name in unit.names])
            room.acquire()
            try:
                tensors: dict[str, torch.Tensor] = {}
                for unit in shards[number]:
                    tensors.update(unit.tensors(checkpoint, dims))
                    bar.update()
                return writers.submit(write, number, tensors)
            except Exception:
                room.release()
                raise

        def write(number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
            try:
                file = partial / hf_writer.shard_name(number + 1, len(shards))
                hf_writer.write_tensors(file, tensors)
                return list(tensors)
            finally:
                room.release()

        reading = [readers.submit(read, number) for number in range(len(shards))]
        try:
            names = [future.result().result() for future in reading]
        finally:
            readers.shutdown(cancel_futures=True)
    return {n: hf_writer.shard_name(i + 1, len(shards)) for i, shard in enumerate(names) for n in shard}


def _shards(units: Sequence[Unit], chunk_bytes: int) -> Iterator[list[Unit]]:
    shard: list[Unit] = []
    for unit in units:
        if shard and sum(member.size for member in shard) + unit.size > chunk_bytes:
            yield shard
            shard = []
        shard.append(unit)
    yield shard


def _correct_config(directory: Path, vocab_size: int | None) -> None:
    """Let ``config.json`` say what was written: weights that are not quantized, and ``vocab_size`` rows."""
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    corrected = {key: value for key, value in config.items() if key != "quantization_config"}
    if vocab_size is not None:
        inner = corrected.get("text_config")
        if isinstance(inner, dict):
            corrected["text_config"] = {**inner, "vocab_size": vocab_size}
        else:
            corrected["vocab_size"] = vocab_size
    if corrected != config:
        path.write_text(json.dumps(corrected, indent=2) + "\n")
