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

from slime.utils import hf_writer
from slime.utils.hf_checkpoint import HfCheckpoint, quantization_of, read_config
from slime.utils.quantization.formats import Format
from slime.utils.quantization.quantizer import Quantizer, ignores, is_linear, read_format

Named = Iterable[tuple[str, torch.Tensor]]
Transform = Callable[[HfCheckpoint, Sequence[str]], Named]
"""From a checkpoint and the names of the tensors in one of its files to what takes their place."""

ONLY_EXPERTS = (
    *("re:.*lm_head.*", "re:.*norm.*", "re:.*embed.*", "re:.*self_attn.*", "re:.*linear_attn.*"),
    *(r"re:.*shared_expert.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*mlp\.gate\..*"),
)
"""What is not quantized in INT4 unless rules are given: all but the routed experts."""


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

    The configuration no longer says that weights are quantized. Raises as ``quantize_checkpoint``, and ValueError for
    a checkpoint that is not quantized, or lacks scales.
    """
    config = read_config(source)
    described = quantization_of(config)
    if described is None:
        raise ValueError(f"{source} is not quantized: its config.json has no quantization_config")
    form = read_format(described)

    def transform(checkpoint: HfCheckpoint, names: Sequence[str]) -> Named:
        return dequantized(checkpoint, names, form)

    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.update({key: "bfloat16" for key in ("torch_dtype", "dtype") if key in part})
    rewrite(source, target, transform, config, {"format": "bf16"}, workers=workers, force=force)


def dequantized(checkpoint: HfCheckpoint, names: Sequence[str], form: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that are stored in the tensors ``names`` of ``checkpoint``, a part of it, in bf16.

    Scales may be in other files. Raises ValueError for a weight without them.
    """
    stored = "" if "" in form.suffixes else form.marker  # what holds the numbers of a weight
    marked = {name.removesuffix(form.marker) for name in checkpoint.names if name.endswith(form.marker)}
    weights = {weight for weight in marked if weight + stored in checkpoint.names}  # logit_scale is no scale of one
    parts = {weight + suffix for weight in weights for suffix in form.suffixes}
    for name in names:
        weight = name.removesuffix(stored)
        if weight in weights and name == weight + stored:
            needed = {suffix: weight + suffix for suffix in form.suffixes}
            absent = [part for part in needed.values() if part not in checkpoint.names]
            if absent:
                raise ValueError(f"{checkpoint.path}: the quantized weight {weight} has no {', '.join(absent)}")
            try:
                yield weight, form.dequantize({suffix: checkpoint.tensor(part) for suffix, part in needed.items()})
            except ValueError as e:
                raise ValueError(f"{checkpoint.path}: {weight}: {e}") from e
        elif name not in parts:
            tensor = checkpoint.tensor(name)
            if tensor.is_floating_point() and tensor.element_size() == 1:
                raise ValueError(f"the FP8 weight {name} of {checkpoint.file_of(name)} has no {name}{form.marker}")
            yield name, tensor


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
