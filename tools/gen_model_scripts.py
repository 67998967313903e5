"""Write ``scripts/models/*.sh`` from the table of models: ``python -m tools.gen_model_scripts [--check]``."""

from __future__ import annotations

import argparse
import shlex
import sys
from itertools import groupby
from pathlib import Path

from slime.models.facts import Model, models
from slime.models.megatron_flags import ModelFlag, describe

FOLDER = Path(__file__).parents[1] / "scripts" / "models"
INDENT, WIDTH = "    ", 120
SHOWN = 2  # repositories in the first line of a script
# What a user may set before the script is sourced: model -> variable.
NUM_LAYERS = {"deepseek-v3"}
ROTARY_BASE = {"qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen3-235B-A22B"}


def render(model: Model) -> str:
    """The script of ``model``."""
    flags = describe({**model.config, "megatron": model.megatron}).flags
    lines = [
        f"# {_title(model)}",
        "# Written by `python -m tools.gen_model_scripts` from slime/models/facts.yaml; change it there.",
        *_notes(model),
        "# shellcheck shell=bash disable=SC2034",
        "MODEL_ARGS=(",
    ]
    for _, members in groupby(flags, key=lambda flag: flag.group):
        words = [word for word in (_words(model, flag) for flag in members) if word]
        lines += [INDENT + line for line in _wrap(words, WIDTH - len(INDENT))]
    return "\n".join([*lines, ")", ""])


def _title(model: Model) -> str:
    names = [*repositories(model), *model.variants]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"{model.script}: {model.about + ' of ' if model.about else ''}{shown}"


def repositories(model: Model) -> tuple[str, ...]:
    """The repositories of ``model``, or of the model it is another name of; of a part of a model only the first."""
    found = model.repositories or models()[str(model.like)].repositories
    return found[:1] if model.local_names else found


def _notes(model: Model) -> list[str]:
    if model.script in NUM_LAYERS:
        return ["# MODEL_ARGS_NUM_LAYERS, set before this is sourced, cuts the model to its first layers (3 at least)."]
    if model.script in ROTARY_BASE:
        return ["# MODEL_ARGS_ROTARY_BASE, set before this is sourced, is for checkpoints with another base."]
    return []


def _words(model: Model, flag: ModelFlag) -> str:
    """``flag`` as it is written in bash; empty where it is not written."""
    words = flag.words()
    if not words:
        return ""
    if flag.option == "--rotary-base" and model.script in ROTARY_BASE:
        return f'{flag.option} "${{MODEL_ARGS_ROTARY_BASE:-{words[1]}}}"'
    if flag.option == "--num-layers" and model.script in NUM_LAYERS:
        return f'{flag.option} "{_num_layers(model)}"'
    if flag.option == "--moe-layer-freq" and model.script in NUM_LAYERS:
        dense = model.config["first_k_dense_replace"]
        return f'{flag.option} "[0]*{dense}+[1]*$(({_num_layers(model)} - {dense}))"'
    if flag.option == "--spec":
        return " ".join([flag.option, *(f'"{word}"' for word in words[1:])])
    return shlex.join(words)


def _num_layers(model: Model) -> str:
    return f"${{MODEL_ARGS_NUM_LAYERS:-{model.config['num_hidden_layers']}}}"


def _wrap(flags: list[str], width: int) -> list[str]:
    """Fill lines with whole flags."""
    lines: list[str] = []
    for flag in flags:
        if lines and len(lines[-1]) + 1 + len(flag) <= width:
            lines[-1] += " " + flag
        else:
            lines.append(flag)
    return lines


def differences(folder: Path = FOLDER) -> list[str]:
    """One line for every script that is not what the table says."""
    scripts = {f"{name}.sh": render(model) for name, model in models().items()}
    wrong = [
        f"{folder / name} does not match slime/models/facts.yaml"
        for name, text in scripts.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]
    return wrong + [f"{path} has no entry in facts.yaml" for path in folder.glob("*.sh") if path.name not in scripts]


def main() -> int:
    """Write the scripts; with ``--check`` only say (exit status 1) which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write; fail when a script is out of date")
    if parser.parse_args().check:
        wrong = differences()
        for line in wrong:
            print(f"{line}; run `python -m tools.gen_model_scripts`", file=sys.stderr)
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, model in models().items():
        (FOLDER / f"{name}.sh").write_text(render(model), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
