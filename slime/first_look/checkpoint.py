"""Looking at the files of the checkpoints that a run reads: weights, and the tokenizer's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.hf_config import read_config
from slime.first_look import Findings
from slime.utils.hf_checkpoint import HfCheckpoint

WEIGHT_FLAGS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "load")
"""``--load`` may have taken its value from the others."""
OTHER_FORMATS = ("*.bin", "*.gguf", "*.pth", "*.pt", "*.h5", "*.msgpack")
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.tiktoken", "*.model", "tokenization_*.py")


def look_at_weights(args: Namespace, found: Findings) -> None:
    """Open every safetensors file, whose header says whether it is whole; report those of ``WEIGHT_FLAGS`` that are
    missing or cannot be read. Megatron's checkpoints have none."""
    flag_of: dict[str, str] = {}
    for name in WEIGHT_FLAGS:
        if directory := getattr(args, name):
            flag_of.setdefault(directory, f"--{name.replace('_', '-')}")
    for directory, flag in flag_of.items():
        if not any(Path(directory).glob("*.safetensors*")):
            if problem := _without_safetensors(args, directory):
                found.errors.append(f"{flag} {directory}: {problem}")
            continue
        found.begins(f"the files of {flag} {directory}")
        try:
            with HfCheckpoint(directory, framework="numpy") as checkpoint:
                checkpoint.open_all()
        except (ValueError, OSError) as e:
            found.errors.append(f"{flag}: {e}")


def _without_safetensors(args: Namespace, directory: str) -> str | None:
    """Return what is wrong with a directory of Hugging Face form that holds no safetensors file, if weights are read.

    Engines alone read some other formats too, and a trainer may load its weights from elsewhere.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        return None
    others = sorted(file.name for pattern in OTHER_FORMATS for file in path.glob(pattern))
    trains = not args.debug_rollout_only
    trainer_reads = trains and directory in (args.load, args.ref_load, args.opd_teacher_load)
    engines_read = (
        directory == args.hf_checkpoint and args.sglang_config is None and bool(args.rollout_num_gpus)
        and not (args.debug_train_only or args.rollout_external) and args.sglang_load_format != "dummy"
    )  # fmt: skip
    if not (trainer_reads or (engines_read and not others)):
        return None
    seen = f"it has {', '.join(others[:3])}, which is not read: convert it" if others else "it has none: fetch it again"
    return f"expected weights in *.safetensors files; {seen} (or give the directory that has them)"


def look_at_tokenizer_files(args: Namespace, found: Findings) -> bool:
    """Report a checkpoint directory without any file of a tokenizer; transformers would make an empty one up."""
    path = Path(args.hf_checkpoint)
    if not path.is_dir() or any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return True
    found.errors.append(
        f"--hf-checkpoint {path} holds no tokenizer (tokenizer.json, tokenizer_config.json and what else the model's "
        "repository has of it): copy these files there from the model that it was made from"
    )
    return False


def look_at_vocabulary(args: Namespace, tokenizer: Any, found: Findings) -> None:
    """Warn of tokens of the tokenizer that the embedding has no row for."""
    try:
        rows = read_config(args.hf_checkpoint).get("vocab_size")
    except ArgumentError:
        return
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(rows, int) and highest >= rows:
        found.warnings.append(
            f"--hf-checkpoint {args.hf_checkpoint}: the tokenizer has ids up to {highest}, config.json a "
            f"vocab_size of {rows}: the first prompt with an id of {rows} or more ends the run; both must be those of "
            "one model"
        )
