"""Write the table of ``scripts/README.md`` from dry runs of the scripts: ``python -m tools.gen_scripts_table``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.script_runs import SCRIPTS, DryRun, dry_runs, script_names

PAGE = SCRIPTS / "README.md"
HEAD = (
    "| Script | Checkpoint | Nodes x GPUs | Trainer | Engines | Features | Not available yet |\n"
    "|---|---|---|---|---|---|---|"
)
_TABLE = re.compile(r"(<!-- table: begin -->\n).*?(<!-- table: end -->)", re.DOTALL)
_ONE = re.compile(r"(--[\w-]+)(?: \S+){0,2} is not available yet in this version")
_ENGINES = re.compile(r"--sglang-config \S+: (.* engines) \(model .*\) are not available yet")
_QUANTIZED = re.compile(r"--hf-checkpoint \S+ is quanti[sz]ed \((\w+)\)")
_SEVERAL = re.compile(r"not available yet in this version; [^:]*: (--.*)")

# What the refused flags stand for, by the names of flags.
FEATURES: dict[str, tuple[str, ...]] = {
    "DeepEP": ("--moe-enable-deepep", "--moe-token-dispatcher-type"),
    "routing replay": ("--use-*routing-replay",),
    "INT4 QAT": ("--train-env-vars",),
}  # fmt: skip


def not_yet(refusals: Iterable[str]) -> list[str]:
    """The features behind the sentences of a refusal; a sentence about anything else is returned as it is."""
    found: dict[str, None] = {}
    for sentence in refusals:
        several, one = _SEVERAL.match(sentence), _ONE.match(sentence)
        quantized, engines = _QUANTIZED.match(sentence), _ENGINES.match(sentence)
        flags = several[1].split(", ") if several else [one[1]] if one else []
        other = f"{quantized[1].upper()} engines" if quantized else engines[1] if engines else sentence
        found.update(dict.fromkeys([_feature(flag) for flag in flags] or [other]))
    return list(found)


def _feature(flag: str) -> str:
    named = (name for name, patterns in FEATURES.items() if any(fnmatchcase(flag, pattern) for pattern in patterns))
    return next(named, f"`{flag}`")


def nodes(values: dict[str, Any]) -> str:
    """Nodes and GPUs of a node; trainer's + engines' GPUs where they are not the same ones."""
    slots, per_node = values["world_size"], values["num_gpus_per_node"]
    apart = 0 if values["colocate"] or values["debug_train_only"] else values["rollout_num_gpus"]
    size = f"{-(-(slots + apart) // per_node)} x {per_node}"
    return f"{size}: {slots} + {apart}" if apart else size


def trainer(values: dict[str, Any]) -> str:
    """Parallel sizes above 1."""
    sizes = {
        "TP": values.get("tensor_model_parallel_size", 1),
        "PP": values.get("pipeline_model_parallel_size", 1),
        "CP": values.get("context_parallel_size", 1),
        "EP": values.get("expert_model_parallel_size", 1),
        "DP": values["data_parallel_size"],
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"


def engines(values: dict[str, Any]) -> str:
    """Engines x GPUs of an engine."""
    if values["debug_train_only"]:
        return "none"
    return f"{values['rollout_num_engines']} x {values['rollout_num_gpus_per_engine']}"


def features(values: dict[str, Any]) -> str:
    """Return what distinguishes a recipe. Megatron's and SGLang's flags are in the file only where they were given."""
    variables = values["train_env_vars"]
    known = {
        "SFT" if values["loss_type"] == "sft_loss" else values["advantage_estimator"].upper(): True,
        "dynamic sampling": values["dynamic_sampling_filter_path"],
        "TIS": values["use_tis"],
        "routing replay": values["use_rollout_routing_replay"],
        "EAGLE": values.get("sglang_speculative_algorithm") == "EAGLE",
        "MTP training": values["enable_mtp_training"],
        "DP attention": values.get("sglang_enable_dp_attention"),
        "DeepEP": values.get("moe_enable_deepep") or values.get("sglang_moe_a2a_backend") == "deepep",
        "prefill and decode engines": values["prefill_num_servers"] or values["sglang_config"],
        "FP8 training": values.get("fp8"),
        "INT4 QAT": "OPEN_TRAINING_INT4_FAKE_QAT_FLAG" in variables,
        "deterministic": values.get("deterministic_mode") and values.get("sglang_enable_deterministic_inference"),
        "Adam on the host": values.get("optimizer_cpu_offload"),
        "no offload": values["colocate"] and not values["offload_train"],
    }
    return ", ".join(name for name, has in known.items() if has)


def row(run: DryRun) -> str:
    """One line of the table."""
    values = run.values
    name = run.name.rpartition("/")[2].removeprefix("run-").removesuffix(".sh")
    cells = (
        f"[{name}]({run.name})",
        Path(values["hf_checkpoint"]).name,
        nodes(values),
        trainer(values),
        engines(values),
        features(values),
        ", ".join(not_yet(run.refusals)) or "-",
    )
    return f"| {' | '.join(cells)} |"


def render(runs: Iterable[DryRun]) -> str:
    """The page with the table of these runs. Raises ValueError when the page has no place for it."""
    table = "\n".join([HEAD, *map(row, runs), ""])
    page, count = _TABLE.subn(lambda match: f"{match[1]}{table}{match[2]}", PAGE.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(
            f"{PAGE} needs one pair of lines <!-- table: begin --> and <!-- table: end -->, it has {count}"
        )
    return page


def main() -> int:
    """Write the table; with ``--check`` only say (exit status 1) whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write; fail when the page is out of date")
    check = parser.parse_args().check
    # layouts are the scripts' own, whatever the user's environment overrides
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    runs = dry_runs(script_names(), env=env)
    for run in runs.values():
        if run.status != 0:
            print(f"{run.name}: exit status {run.status}\n{run.err}", file=sys.stderr)
            return 1
    page = render(runs.values())
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} does not match the scripts; run `python -m tools.gen_scripts_table`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
