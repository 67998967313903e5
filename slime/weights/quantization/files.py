"""Whole checkpoints: quantized, and in bf16 again. File by file, so that memory is that of the files in work.

Every file is read back before it counts. The directory appears when it is complete; what was killed before continues
with the files that are missing when it is started again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint, quantization_of, read_config
from slime.weights.quantization.formats import Format, Mxfp4, Stored
from slime.weights.quantization.quantizer import Quantizer, ignores, is_linear, read_format

Named = Iterable[tuple[str, torch.Tensor]]
Transform = Callable[[HfCheckpoint, Sequence[str]], Named]
"""From a checkpoint and the names of the tensors in one of its files to what takes their place."""

ONLY_EXPERTS = (
    *("re:.*lm_head.*", "re:.*norm.*", "re:.*embed.*", "re:.*self_attn.*", "re:.*linear_attn.*"),
    *(r"re:.*shared_expert.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*mlp\.gate\..*"),
)
"""Weights that are not quantized in INT4 unless rules are given: all but the routed experts."""


def quantize_checkpoint(
    source: Path, target: Path, form: Format, rules: Sequence[str] = (), *, workers: int = 1, force: bool = False
) -> None:
    """Write ``target``: the checkpoint ``source`` with the linear layers that ``rules`` do not ignore in ``form``.

    Raises FileExistsError for a ``target`` that is there without ``force``, FileNotFoundError for what is no
    checkpoint, and ValueError for one that is quantized, has no linear layer left, or whose weights do not divide.
    """
    weights = Chosen.of(source, form, rules)
    quantizer = Quantizer(form, lambda name, _: name in weights.names)

    def transform(checkpoint: HfCheckpoint, names: Sequence[str]) -> Named:
        return quantizer.stream((name, checkpoint.tensor(name)) for name in names)

    made_of = {"format": described(form), "rules": list(rules)}
    rewrite(source, target, transform, weights.config(form, rules), made_of, workers=workers, force=force)


@dataclass(frozen=True)
class Chosen:
    """The weights ``names`` of the checkpoint ``source`` that are to be quantized; ``shapes`` are those of all."""

    source: Path
    names: frozenset[str]
    shapes: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, source: Path, form: Format, rules: Sequence[str]) -> Chosen:
        """Choose linear layers that ``rules`` do not ignore. Raises as ``quantize_checkpoint``."""
        if quantization_of(read_config(source)):
            raise ValueError(f"{source} is quantized already: convert it to bf16 first")
        with HfCheckpoint(source) as checkpoint:
            shapes = {name: checkpoint.slice(name).get_shape() for name in checkpoint.names}
        names = {n for n, shape in shapes.items() if is_linear(n, shape) and not any(ignores(r, n) for r in rules)}
        if not names:
            raise ValueError(f"the rules {', '.join(rules)} leave no linear layer of {source} to quantize")
        quantizer = Quantizer(form, lambda name, _: name in names)
        for name in sorted(names):  # what does not divide is found before anything is written
            list(quantizer.quantize(name, torch.empty(shapes[name], device="meta")))
        return cls(source, frozenset(names), shapes)

    def config(self, form: Format, rules: Sequence[str]) -> dict[str, Any]:
        """Return ``config.json`` of the quantized checkpoint, which lists what is not quantized."""
        left = sorted(n.removesuffix(".weight") for n, s in self.shapes.items() if len(s) > 1 and n not in self.names)
        return {**read_config(self.source), "quantization_config": form.config([*rules, *left])}


def described(form: Format) -> list[Any]:
    """Return what tells ``form`` from others, as JSON."""
    return [type(form).__name__, asdict(form)]  # type: ignore[call-overload]


def to_bf16(source: Path, target: Path, *, workers: int = 1, force: bool = False) -> None:
    """Write ``target``: the checkpoint ``source`` with every quantized weight in bf16, and the rest as it is.

    The configuration no longer describes quantized weights. Raises as ``quantize_checkpoint``, and ValueError for
    a checkpoint that is not quantized, or lacks scales.
    """
    config = read_config(source)
    described = quantization_of(config)
    if described is None:
        raise ValueError(f"{source} is not quantized: its config.json has no quantization_config")
    form: Stored = Mxfp4() if described.get("quant_method") == "mxfp4" else read_format(described)

    def transform(checkpoint: HfCheckpoint, names: Sequence[str]) -> Named:
        return dequantized(checkpoint, names, form)

    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.update({key: "bfloat16" for key in ("torch_dtype", "dtype") if key in part})
    rewrite(source, target, transform, config, {"format": "bf16"}, workers=workers, force=force)


class Weights:
    """The weights of ``checkpoint`` by name; those that ``form`` says are quantized, in bf16. Read when asked for.

    Scales may be in other files. Raises ValueError for a weight without them.
    """

    def __init__(self, checkpoint: HfCheckpoint, form: Stored | None) -> None:
        self._checkpoint, self._form = checkpoint, form
        self._quantized: frozenset[str] = frozenset()
        numbers, parts = "", set()
        if form is not None:
            numbers = "" if "" in form.suffixes else form.marker  # what holds the numbers of a weight
            marked = {name.removesuffix(form.marker) for name in checkpoint.names if name.endswith(form.marker)}
            # logit_scale is no scale of one
            self._quantized = frozenset(weight for weight in marked if weight + numbers in checkpoint.names)
            parts = {weight + suffix for weight in self._quantized for suffix in form.suffixes}
        self._stored = {name: name for name in checkpoint.names - parts}
        self._stored |= {weight: weight + numbers for weight in self._quantized}
        self.by_tensor = {stored: weight for weight, stored in self._stored.items()}
        """The weight that the numbers in a tensor of the checkpoint are of, by tensor; scales are not in it."""

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all weights."""
        return frozenset(self._stored)

    def file_of(self, name: str) -> Path:
        """Return the file with the numbers of the weight."""
        return self._checkpoint.file_of(self._stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the weight's shape, of which nothing but a header is read."""
        stored = self._stored[name]
        if name in self._quantized and stored != name:  # packed
            return tuple(self._checkpoint.tensor(f"{name}_shape").tolist())
        return tuple(self._checkpoint.slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the weight's dtype."""
        if name in self._quantized:
            return torch.bfloat16
        return self._checked(name, self._checkpoint.slice(name)[:0]).dtype

    def slice(self, name: str) -> Any:
        """Return the weight, or a lazy view of it."""
        return self.tensor(name) if name in self._quantized else self._checkpoint.slice(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the weight."""
        checkpoint, form = self._checkpoint, self._form
        if form is None or name not in self._quantized:
            return self._checked(name, checkpoint.tensor(name))
        needed = {suffix: name + suffix for suffix in form.suffixes}
        absent = [part for part in needed.values() if part not in checkpoint.names]
        if absent:
            raise ValueError(f"{checkpoint.path}: the quantized weight {name} has no {', '.join(absent)}")
        try:
            return form.dequantize({suffix: checkpoint.tensor(part) for suffix, part in needed.items()})
        except ValueError as e:
            raise ValueError(f"{checkpoint.path}: {name}: {e}") from e

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.element_size() == 1:
            scale = self._form.marker if self._form is not None else "_scale_inv"
            raise ValueError(f"the FP8 weight {name} of {self._checkpoint.file_of(name)} has no {name}{scale}")
        return tensor


def dequantized(checkpoint: HfCheckpoint, names: Sequence[str], form: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that are stored in the tensors ``names`` of ``checkpoint``, a part of it, in bf16.

    Raises ValueError as ``Weights``.
    """
    weights = Weights(checkpoint, form)
    for weight in (weights.by_tensor[name] for name in names if name in weights.by_tensor):
        yield weight, weights.tensor(weight)


def rewrite(
    source: Path,
    target: Path,
    transform: Transform,
    config: dict[str, Any],
    made_of: dict[str, Any],
    *,
    workers: int,
    force: bool,
) -> None:
    """Write ``target`` with ``transform`` of every file of ``source``, under the name of that file, and ``config``."""
    target = Path(os.path.abspath(target))
    hf_writer.check_output(target, force=force, sources={"the checkpoint": source})
    with HfCheckpoint(source) as checkpoint:
        checkpoint.open_all()
        files: dict[str, list[str]] = {}
        for name in sorted(checkpoint.names):
            files.setdefault(checkpoint.file_of(name).name, []).append(name)
        states = {file: state_of(source / file) for file in files}
        partial = hf_writer.begin(target, {**made_of, "source": str(source.resolve()), "files": states})
        missing = [file for file in files if not (partial / file).is_file()]
        total = sum(states[file][0] for file in files)
        done = total - sum(states[file][0] for file in missing)
        with (
            tqdm(desc=target.name, total=total, initial=done, unit="B", unit_scale=True, disable=None) as bar,
            ThreadPoolExecutor(max(1, workers)) as pool,
        ):

            def write(file: str) -> None:
                hf_writer.write_tensors(partial / file, dict(transform(checkpoint, files[file])))
                bar.update(states[file][0])

            try:
                list(pool.map(write, missing))
            except ValueError:  # of this checkpoint: there is nothing to continue
                pool.shutdown(cancel_futures=True)
                shutil.rmtree(partial)
                raise
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    weight_map, size = {}, 0
    for file in files:
        with (partial / file).open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
        names = json.loads(header).keys() - {"__metadata__"}
        weight_map.update(dict.fromkeys(names, file))
        size += (partial / file).stat().st_size - 8 - len(header)
        if not names:  # of scales alone
            (partial / file).unlink()
    hf_writer.write_index(partial, weight_map, size)
    hf_writer.copy_other_files(source, partial)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    hf_writer.publish(partial, target)


def state_of(file: Path) -> list[int]:
    """Return what changes when ``file`` does: its size, and when it was written."""
    return [file.stat().st_size, file.stat().st_mtime_ns]
