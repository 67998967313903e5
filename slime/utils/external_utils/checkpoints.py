"""Hugging Face checkpoints as trainers load them: under the names that scripts expect, and FP8 weights in bf16."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
"""A weight in FP8 has its scales, one per block, beside it: ``NAME`` and ``NAME_scale_inv``."""


def make_loadable(source: Path, target: Path) -> None:
    """Make ``target`` usable as ``--load`` or ``--ref-load``: a link to ``source``, or of an FP8 one a bf16 copy.

    Trainers read Hugging Face checkpoints themselves, so there is nothing else to convert. An empty ``target`` is
    replaced. Raises FileNotFoundError when ``source`` is no Hugging Face checkpoint and FileExistsError when
    ``target`` is something else already.
    """
    config = source / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{source} is no Hugging Face checkpoint (it has no config.json), so {target} cannot be made of it; "
            "download the model there, or name the directory where it is"
        )
    if target.exists() and target.resolve() == source.resolve():
        print(f"{target} is {source} already", flush=True)
        return
    if target.is_symlink() and not target.exists():
        target.unlink()  # a link to something that has gone
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already and is not {source}: remove it or choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    method = (json.loads(config.read_text()).get("quantization_config") or {}).get("quant_method")
    if method == "fp8":
        cast_to_bf16(source, target)
        print(f"{target} is {source} in bf16", flush=True)
        return
    target.symlink_to(source.resolve(), target_is_directory=True)
    print(f"{target} is a link to {source}: trainers read Hugging Face checkpoints, nothing to convert", flush=True)


def cast_to_bf16(source: Path, target: Path) -> None:
    """Write ``target``: the checkpoint ``source`` with every FP8 weight times its scales, in bf16.

    Other tensors and files stay as they are, and the configuration no longer says that weights are quantized. The
    directory appears when it is complete. One file is held in memory at a time. Raises FileNotFoundError for what is
    no checkpoint and ValueError for one that is not in FP8 or lacks scales.
    """
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} is no Hugging Face checkpoint: it has no config.json")
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method != "fp8":
        raise ValueError(f"{source} is no FP8 checkpoint: expected quant_method fp8 in its config.json, got {method!r}")
    block = config.pop("quantization_config").get("weight_block_size") or (1, 1)
    target.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_weights(source, written, block)
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
                shutil.copy2(path, written / path.name)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        (written / "config.json").write_text(json.dumps({**config, key: "bfloat16"}, indent=2) + "\n")
        written.chmod(0o755)
        written.rename(target)
    except BaseException:  # Ctrl-C too: it takes minutes
        shutil.rmtree(written, ignore_errors=True)
        raise


def dequantize(weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """Return ``weight`` [..., m, n] in bf16, each block of ``block`` = (rows, columns) times its entry of ``scales``.

    ``scales`` is [..., ceil(m / rows), ceil(n / columns)], or one number for the whole tensor.
    """
    import torch

    scales = scales.float()
    if scales.numel() > 1:
        blocks = tuple(-(-size // length) for size, length in zip(weight.shape[-2:], block, strict=True))
        if tuple(scales.shape[-2:]) != blocks:
            raise ValueError(
                f"a weight {tuple(weight.shape)} in blocks of {tuple(block)} needs scales {blocks}, "
                f"got {tuple(scales.shape)}"
            )
        for dimension, length in ((-2, block[0]), (-1, block[1])):
            scales = scales.repeat_interleave(length, dimension).narrow(dimension, 0, weight.shape[dimension])
    return (weight.float() * scales).to(torch.bfloat16)


def _write_weights(source: Path, target: Path, block: Sequence[int]) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{source} holds no *.safetensors")
    home: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            home.update(dict.fromkeys(opened.keys(), file))
    scales = {name + SCALE for name in home}
    total = 0
    weight_map: dict[str, str] = {}
    for file in files:
        names = [name for name, path in home.items() if path == file and name not in scales]
        tensors = {name: _tensor(name, home, block) for name in names}
        if not tensors:
            continue  # a file of scales alone
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map.update(dict.fromkeys(tensors, file.name))
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensor(name: str, home: dict[str, Path], block: Sequence[int]) -> torch.Tensor:
    weight = _load(name, home)
    if weight.element_size() > 1 or not weight.is_floating_point():
        return weight
    if name + SCALE not in home:
        raise ValueError(f"the FP8 weight {name} of {home[name]} has no {name + SCALE}")
    return dequantize(weight, _load(name + SCALE, home), block)


def _load(name: str, home: dict[str, Path]) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(home[name], framework="pt") as opened:
        return opened.get_tensor(name)
