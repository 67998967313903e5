"""Parse command lines in tests: a tiny checkpoint's ``config.json`` and the flags every run needs are supplied."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import shlex
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 384, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
MODEL_FLAGS: list[str] = shlex.split(
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --vocab-size 384 --norm-epsilon 1e-6 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --use-rotary-position-embeddings --rotary-base 10000 --qk-layernorm"
)


@cache
def _checkpoint_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="slime-test-config-")
    (Path(directory.name) / "config.json").write_text(json.dumps(CONFIG))
    (Path(directory.name) / "prompts.jsonl").write_text('{"input": "1 + 1 ="}\n')
    return directory


def minimal_flags() -> list[str]:
    """The shortest command line that is accepted, for a config-only checkpoint made on the fly."""
    directory = _checkpoint_directory().name
    return [
        "--hf-checkpoint", directory, "--rollout-batch-size", "4", "--global-batch-size", "4", "--num-rollout", "1",
        "--prompt-data", f"{directory}/prompts.jsonl", "--rollout-max-response-len", "32",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", *MODEL_FLAGS,
    ]  # fmt: skip


def parse(*flags: Any, **keywords: Any) -> argparse.Namespace:
    """``parse_args`` of ``minimal_flags`` and ``flags``; a flag given again wins over the minimal one."""
    from slime.arguments import parse_args

    return parse_args([*minimal_flags(), *map(str, flags)], **keywords)


@cache
def _parsed(*flags: str) -> tuple[argparse.Namespace, bytes]:
    """Parsed arguments, and the few of their 1,400 values that a test could change in place, pickled."""
    args = parse(*flags)
    shared = (bool, int, float, str, type(None))
    return args, pickle.dumps({key: value for key, value in vars(args).items() if not isinstance(value, shared)})


def run_args(*flags: Any, **overrides: Any) -> argparse.Namespace:
    """Return the parsed arguments of a run: ``minimal_flags`` and ``flags``, with ``overrides`` set afterwards.

    A command line is parsed once per process and copied. The checks of the command line do not see ``overrides``, so
    a test may set what they would refuse or derive; a name that no run has is a ``TypeError``.
    """
    parsed, changeable = _parsed(*map(str, flags))
    args = argparse.Namespace(**vars(parsed))
    vars(args).update(pickle.loads(changeable))
    unknown = sorted(overrides.keys() - vars(args).keys())
    if unknown:
        raise TypeError(f"parsed arguments have no attribute {', '.join(unknown)}")
    vars(args).update(copy.deepcopy(overrides))
    return args


def hand_made(args: argparse.Namespace) -> SimpleNamespace:
    """Return ``args`` as a program without slime's parser sets them: what declared defaults say too is left out."""
    from slime.arguments.command_line import all_flags
    from slime.utils.declared import DERIVED, PARSED

    defaults = {**{flag.dest: flag.default for flag in all_flags()}, **DERIVED}
    absent = object()
    own = {name: value for name, value in vars(args).items() if value != defaults.get(name, absent)}
    own.pop(PARSED, None)
    return SimpleNamespace(**own)


def dry(*flags: Any) -> argparse.Namespace:
    """Return the arguments and findings of ``--dry-run`` for ``minimal_flags`` and ``flags``; nothing is printed."""
    from slime.arguments.parse import resolve

    return resolve([*_minimal_without(map(str, flags)), "--dry-run", *map(str, flags)], *known())


def _minimal_without(flags: Iterable[str]) -> list[str]:
    """``minimal_flags`` without those of ``flags``: what is given twice is a warning."""
    given, kept = set(flags), list[str]()
    use = ""
    for word in minimal_flags():
        use = word if word.startswith("--") else use
        kept += [word] if use not in given else []
    return kept


_known: list[tuple[Any, argparse.ArgumentParser]] = []


def known() -> tuple[Any, argparse.ArgumentParser]:
    """Every known flag and a parser of them, which all tests share; made again where a test changes the flags."""
    from slime.arguments.command_line import all_flags, build_parser

    flags = all_flags()
    if not _known or _known[0][0] is not flags:
        _known[:] = [(flags, build_parser(flags))]
    return _known[0]
