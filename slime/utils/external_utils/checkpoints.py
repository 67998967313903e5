"""Hugging Face checkpoints as trainers load them: under the names that scripts expect, and in bf16."""

from __future__ import annotations

from pathlib import Path

from slime.utils.hf_checkpoint import read_config


def make_loadable(source: Path, target: Path) -> None:
    """Make ``target`` usable as ``--load`` or ``--ref-load``: a link to ``source``, or of a quantized one a bf16 copy.

    Trainers read Hugging Face checkpoints themselves, so there is nothing else to convert. An empty ``target`` is
    replaced. Raises FileNotFoundError when ``source`` is no Hugging Face checkpoint and FileExistsError when
    ``target`` is something else already.
    """
    if not (source / "config.json").is_file():
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
    if read_config(source).get("quantization_config"):
        from slime.utils.quantization.files import to_bf16

        to_bf16(source, target)
        print(f"{target} is {source} in bf16", flush=True)
        return
    target.symlink_to(source.resolve(), target_is_directory=True)
    print(f"{target} is a link to {source}: trainers read Hugging Face checkpoints, nothing to convert", flush=True)
