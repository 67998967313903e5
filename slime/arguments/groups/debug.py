"""Configuration files and the dry run, partial loops, dumps, profiles and the switches of continuous integration."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract, Template


class Configuration(ArgumentGroup):
    """Configuration files and the dry run."""

    title = "configuration"
    read_by = "run"

    config: str | None = flag(
        None,
        "YAML file of flags, for example one written by --dump-config; flags on the command line win",
        saved=False,
        path="file",
    )
    dump_config: str | None = flag(None, "write the resolved configuration to this YAML file", saved=False, path="file")
    dry_run: Literal["plan", "full"] | None = flag(
        None,
        "check everything without Ray, engines, GPUs or network; print batch sizes, placement and memory, then exit; "
        "--dry-run=full prints the whole configuration too",
        nargs="?",
        saved=False,
    )
    gpu_memory_gb: float | None = flag(
        None,
        "memory of a GPU in GB, as it is sold: what the estimate of memory is compared with; a real run without it "
        "asks nvidia-smi",
        gt=0,
    )
    custom_config_path: str | None = flag(
        None, "YAML mapping whose keys are set on the namespace (the values of your own plug-ins)", path="file"
    )
    custom_arguments_path: DottedPath | None = flag(
        None,
        "dotted path of your own function(parser), which adds flags of yours and returns the parser; default: "
        "$SLIME_CUSTOM_ARGUMENTS_PATH",
        hook=Contract("fn(parser), which returns the parser", 1, caller="parser"),
    )
    ignore_unknown_flags: bool = flag(False, "warn about unknown flags instead of refusing them (old launch scripts)")


class Debug(ArgumentGroup):
    """Partial loops and dumps."""

    title = "debugging"
    read_by = "run"

    debug_rollout_only: bool = flag(False, "start engines but no trainer: generate only")
    debug_train_only: bool = flag(
        False,
        "start the trainer but no engines: train on what the rollout function makes without them (SFT), or on dumps",
    )
    skip_first_look: bool = flag(
        False, "start without a look at prompts and hooks, which imports hooks and calls custom rewards once"
    )
    save_debug_rollout_data: str | None = flag(
        None,
        "path template with {rollout_id}: dump the samples of every rollout",
        template=Template(("rollout_id",), ("rollout_id",), "dumps/{rollout_id}.pt"),
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "path template with {rollout_id}: train on dumps of --save-debug-rollout-data; no engines start",
        template=Template(("rollout_id",), (), "dumps/{rollout_id}.pt"),
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "part of a dump to keep, above 0 and up to 1: its first and its last samples", gt=0, le=1
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "dumps to replay while engines run, with --rollout-function-path slime.rollout.forge_load.generate_rollout",
        template=Template(("rollout_id",), (), "dumps/{rollout_id}.pt"),
    )
    save_debug_train_data: str | None = flag(
        None,
        "path template with {rollout_id} and {rank}: dump what trainers get",
        read_by="trainers",
        template=Template(("rollout_id", "rank"), ("rollout_id",), "dumps/{rollout_id}.pt"),
        silenced_by=("no trainer",),
    )
    dump_details: str | None = flag(
        None,
        "directory for everything: --save-debug-rollout-data, --save-debug-train-data and the tokenizer",
        path="directory",
    )


class Profiling(ArgumentGroup):
    """Profiles and memory records."""

    title = "profiling"

    use_pytorch_profiler: bool = flag(False, "trace training with torch's profiler", silenced_by=("no trainer",))
    profile_step_start: int = flag(
        10, "first rollout that is profiled, with --use-pytorch-profiler", ge=0, needs="--use-pytorch-profiler"
    )
    profile_step_end: int = flag(12, "first rollout after it that is not", ge=1, needs="--use-pytorch-profiler")
    profile_ranks: list[int] = flag([0], "ranks that are profiled", needs="--use-pytorch-profiler")
    tensorboard_dir: str | None = flag(
        None,
        "directory of the traces of --use-pytorch-profiler; default: profile, below the run directory",
        path="directory",
        needs="--use-pytorch-profiler",
    )
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = flag(
        ["train_overall"], "parts of training to profile", needs="--use-pytorch-profiler"
    )
    memory_snapshot_dir: str = flag(
        ".",
        "directory of memory snapshots, with --record-memory-history",
        path="directory",
        needs="--record-memory-history",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle", "end of the names of memory snapshots", path="file", needs="--record-memory-history"
    )
    memory_snapshot_num_steps: int | None = flag(
        None,
        "stop recording memory after this many rollouts; default: at the end",
        ge=1,
        needs="--record-memory-history",
    )
    memory_recorder: Literal["torch", "memray"] = flag(
        "torch", "what records memory: torch the GPU's, memray the host's", needs="--record-memory-history"
    )
    record_memory_history: bool = flag(False, "record allocations of memory in the trainers")


class ContinuousIntegration(ArgumentGroup):
    """Extra assertions."""

    title = "continuous integration"

    ci_test: bool = flag(False, "check during the run what must hold in tests: log-probs, KL and gradients")
    ci_disable_kl_checker: bool = flag(False, "leave the check of the KL out of --ci-test", needs="--ci-test")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1,
        "largest mean difference of the log-probs of trainer and engine that --ci-test accepts",
        ge=0,
        needs="--ci-test",
    )
    ci_save_grad_norm: str | None = flag(
        None,
        "path template with {role}, {rollout_id} and {step_id}: write gradient norms",
        template=Template(
            ("role", "rollout_id", "step_id"), ("rollout_id", "step_id"), "norms/{role}_{rollout_id}_{step_id}.pt"
        ),
        silenced_by=("no trainer",),
    )
    ci_load_grad_norm: str | None = flag(
        None,
        "path template of --ci-save-grad-norm: compare gradient norms with those of another run",
        template=Template(("role", "rollout_id", "step_id"), (), "norms/{role}_{rollout_id}_{step_id}.pt"),
        silenced_by=("no trainer",),
    )
