"""Prompt files and evaluation data sets."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slime.algorithms.reward_types import REWARD_TYPES
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.files.eval_config import FOR_PLUGINS, datasets_from_args, own_path
from slime.arguments.groups.rollout import GENERATE_WITH_ENGINES

BUILT_IN_SOURCES = "slime.rollout.data_source."
KINDS = (".jsonl", ".json", ".parquet")
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]")


def check_prompts(args: Args) -> None:
    """The built-in data sources need a file; other sources and replays may need none."""
    built_in = args.data_source_path.startswith(BUILT_IN_SOURCES)
    draws = args.rollout_global_dataset and args.load_debug_rollout_data is None and args.num_rollout != 0
    if args.prompt_data is None:
        if draws and built_in:
            message = "--prompt-data is missing; --disable-rollout-global-dataset says that there are no prompts"
            diagnostics.missing_flag(args, "prompt_data", message)
        return
    if not args.rollout_global_dataset:
        diagnostics.warn(args, f"--prompt-data {args.prompt_data} has no effect with --disable-rollout-global-dataset")
    elif draws and built_in:
        check_file(args, f"--prompt-data {args.prompt_data}", args.prompt_data)


def check_media(args: Args) -> None:
    """Refuse media that are not available, and images for a checkpoint that does not see; choose who makes pixels."""
    keys = set(args.multimodal_keys or ()).union(*(dataset.multimodal_keys or () for dataset in args.eval_datasets))
    if not keys:
        return
    if others := sorted(keys - {"image"}):
        raise ArgumentError(f"--multimodal-keys: {', '.join(others)} is not available yet; images are, as image")
    path = Path(str(args.hf_checkpoint)) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # else it is reported elsewhere
    if config is not None and "vision_config" not in config:
        raise ArgumentError(
            f"--multimodal-keys: the model in --hf-checkpoint {args.hf_checkpoint} does not see: its config.json has "
            "no vision_config"
        )
    if args.sglang_image_processor_backend == "auto":  # trainer and engines are to get the same pixels
        args.sglang_image_processor_backend = "pil"
    if args.sglang_image_processor_backend != "pil" and not args.debug_train_only:
        diagnostics.warn(
            args,
            f"--sglang-image-processor-backend {args.sglang_image_processor_backend}: engines prepare images on their "
            "GPU, and trainers get those of the CPU, which may differ a little; pil makes the same of both",
        )


def check_file(args: Args, given: str, text: str) -> None:
    """Refuse what is no file of a kind in ``KINDS`` or slice of one. ``given`` names the flag in messages."""
    path = Path(_path_of(given, text))
    if path.suffix not in KINDS:
        raise ArgumentError(f"{given}: expected a .jsonl, .json or .parquet file, path@[a:b] for a slice")
    if path.is_file():
        return
    whole = text == str(path)
    if path.is_dir():
        problem = "this is a directory" if whole else f"{path} is a directory"
    else:
        problem = "there is no such file" if whole else f"there is no file {path}"
        problem += "" if path.is_absolute() else f" (in {Path.cwd()})"
    diagnostics.unavailable(args, f"{given}: {problem}")


def _path_of(given: str, text: str) -> str:
    match = _SLICE.fullmatch(text)
    if match is None:
        if "@[" in text or text.endswith("]"):
            raise ArgumentError(f"{given}: expected a slice like path@[0:100], path@[:100] or path@[-100:]")
        return text
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    backwards = start is not None and stop is not None and (start < 0) == (stop < 0) and start >= stop
    if stop == 0 or backwards:
        rows = text[len(match["path"]) + 1 :]
        raise ArgumentError(f"{given}: the slice {rows} holds no row: its end is not above its start")
    return match["path"]


def resolve_datasets(args: Args) -> None:
    """Set ``args.eval_datasets`` and rewrite ``args.eval_prompt_data`` to the flat name/path list, or None."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    args.eval_datasets = datasets_from_args(args, REWARD_TYPES)
    for dataset in args.eval_datasets:
        if dataset.multimodal_keys and not args.multimodal_keys:
            raise ArgumentError(
                f"--eval-config {args.eval_config}, data set {dataset.name}: multimodal_keys needs --multimodal-keys, "
                "by which the run loads the processor of images"
            )
    pairs = [word for dataset in args.eval_datasets for word in (dataset.name, dataset.path)]
    args.eval_prompt_data = pairs or None
    if args.eval_interval is not None and not args.eval_datasets and not args.debug_train_only:
        raise ArgumentError(
            f"--eval-interval {args.eval_interval} needs data: give --eval-prompt-data NAME PATH or --eval-config FILE"
        )


def fall_back_to_rollout(args: Args) -> None:
    """Function and context length of the rollout hold for evaluation unless it has its own."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len
    if args.eval_interval is not None and not args.debug_train_only:
        if args.eval_top_k is not None and args.eval_top_k != -1 and args.eval_top_k < 1:
            raise ArgumentError(f"--eval-top-k {args.eval_top_k}: give a number of tokens, or -1 for all")
        if args.eval_function_path in GENERATE_WITH_ENGINES:
            _check_built_in(args)


def _check_built_in(args: Args) -> None:
    """The built-in evaluation reads files, scores single samples, and leaves some keys of the file to plug-ins."""
    if args.group_rm:
        raise ArgumentError(
            "--group-rm scores groups, of which the built-in evaluation has none; give --eval-function-path, or leave "
            "--eval-interval out"
        )
    option = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}, data set"
    for dataset in args.eval_datasets:
        own = own_path(dataset, "custom_generate_function_path")
        custom = args.custom_generate_function_path if own is None else own
        if dataset.max_response_len is None and args.eval_max_context_len is None and not custom:
            raise ArgumentError(
                f"{option} {dataset.name}: how long may a response get? Give --eval-max-response-len or "
                "--rollout-max-response-len"
            )
        check_file(args, f"{option} {dataset.name} {dataset.path}", dataset.path)
        unread = [name for name in FOR_PLUGINS if getattr(dataset, name) is not None]
        if unread:
            diagnostics.warn(
                args,
                f"--eval-config, data set {dataset.name}: {', '.join(unread)} without effect in the built-in "
                "evaluation (plug-ins find the values in args.eval_datasets)",
            )
