"""Prompt files: their kind, their slice, and whether they are there."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError

BUILT_IN_SOURCES = "slime.rollout.data_source."
KINDS = (".jsonl", ".json", ".parquet")
_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\]")


def check(args: Namespace) -> None:
    """The built-in data sources need a file; other sources and replays may need none."""
    built_in = args.data_source_path.startswith(BUILT_IN_SOURCES)
    draws = args.rollout_global_dataset and args.load_debug_rollout_data is None and args.num_rollout != 0
    if args.prompt_data is None:
        if draws and built_in:
            message = "--prompt-data is missing; --disable-rollout-global-dataset says that there are no prompts"
            unchecked.need(args, "prompt_data", message)
        return
    if not args.rollout_global_dataset:
        unchecked.warn(args, f"--prompt-data {args.prompt_data} has no effect with --disable-rollout-global-dataset")
    elif draws and built_in:
        check_file(args, f"--prompt-data {args.prompt_data}", args.prompt_data)


def check_file(args: Namespace, given: str, text: str) -> None:
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
    unchecked.missing(args, f"{given}: {problem}")


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
