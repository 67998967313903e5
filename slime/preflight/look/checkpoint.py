"""Looking at the files of the checkpoints that a run reads: weights, and the tokenizer's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag
from slime.arguments.groups import slime_flags
from slime.arguments.placement import models_of
from slime.arguments.rules.hf_config import read_config
from slime.preflight.look import Findings
from slime.weights.hf.checkpoint import HfCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_FORMATS = ("*.bin", "*.gguf", "*.pth", "*.pt", "*.h5", "*.msgpack")
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.tiktoken", "*.model", "tokenization_*.py")


def look_at_weights(args: Args, found: Findings) -> None:
    """Open every safetensors file, whose header shows whether it is whole; report those of flags that name a model and
    of the models of ``--sglang-config`` that are missing or cannot be read. Megatron's checkpoints have none."""
    flag_of: dict[str, str] = {}
    for flag in sorted(_model_flags(), key=lambda flag: flag.dest == "load"):  # it may have its value from the others
        if directory := getattr(args, flag.dest):
            flag_of.setdefault(directory, flag.option)
    served = _served(args)
    for directory, option in {**served, **flag_of}.items():
        if not any(Path(directory).glob("*.safetensors*")):
            if problem := _without_safetensors(args, directory, served=directory in served):
                found.errors.append(f"{option} {directory}: {problem}")
            continue
        found.begins(f"the files of {option} {directory}")
        try:
            with HfCheckpoint(directory, framework="numpy") as checkpoint:
                checkpoint.open_all()
        except (ValueError, OSError) as e:
            found.errors.append(f"{option}: {e}")


def _model_flags() -> list[Flag]:
    return [flag for flag in slime_flags() if flag.traits.path == "model"]


def _served(args: Args) -> dict[str, str]:
    """Return the checkpoint directories that engines of this run read, with what names them."""
    if args.debug_train_only or args.rollout_external or not args.rollout_num_gpus:
        return {}
    if args.sglang_load_format == "dummy":  # weights are made up
        return {}
    if args.sglang_config is None:
        return {args.hf_checkpoint: "--hf-checkpoint"}
    models = models_of(args) or ()
    return {str(model.model_path): f"--sglang-config, model {model.name}:" for model in models}


def _without_safetensors(args: Args, directory: str, *, served: bool) -> str | None:
    """Return what is wrong with a directory of Hugging Face form that holds no safetensors file, if weights are read.

    Engines alone read some other formats too, and a trainer may load its weights from elsewhere.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        return None
    others = sorted(file.name for pattern in OTHER_FORMATS for file in path.glob(pattern))
    of_trainers = [getattr(args, flag.dest) for flag in _model_flags() if flag.dest != "hf_checkpoint"]
    trained = not args.debug_rollout_only and directory in of_trainers
    if not (trained or (served and not others)):
        return None
    seen = f"it has {', '.join(others[:3])}, which is not read: convert it" if others else "it has none: fetch it again"
    return f"expected weights in *.safetensors files; {seen} (or give the directory that has them)"


def look_at_adapters(args: Args, found: Findings) -> None:
    """Report projections of ``--lora-target-modules`` that the model's family has not."""
    if not args.lora_rank or args.debug_rollout_only or args.lora_target_modules == ["all-linear"]:
        return
    from slime.backends.megatron_utils.weights.maps import family_of

    try:
        name = args.model_name or read_config(args.hf_checkpoint).get("model_type")
        family = family_of(str(name).lower().removesuffix("config"))
    except (ArgumentError, ValueError):
        return
    tensors = {hf for rule in family.rules for hf in rule.hf}
    there = {hf.removesuffix(".weight").rpartition(".")[2] for hf in tensors if hf.endswith(".weight")}
    if unknown := sorted(set(args.lora_target_modules) - there - {"all-linear"}):
        linear = sorted(module for module in there if "proj" in module)
        found.errors.append(
            f"--lora-target-modules {' '.join(unknown)}: {family.name} has no such layer; it has {', '.join(linear)}, "
            "and all-linear means all of them"
        )


def look_at_tokenizer_files(args: Args, found: Findings) -> bool:
    """Report a checkpoint directory without any file of a tokenizer; transformers would make an empty one up."""
    path = Path(args.hf_checkpoint)
    if not path.is_dir() or any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return True
    found.errors.append(
        f"--hf-checkpoint {path} holds no tokenizer (tokenizer.json, tokenizer_config.json and what else the model's "
        "repository has of it): copy these files there from the model that it was made from"
    )
    return False


def look_at_vocabulary(args: Args, tokenizer: PreTrainedTokenizerBase, found: Findings) -> None:
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
