"""Partial loops, dumps, profiles and the switches of continuous integration."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag


class Debug(ArgumentGroup):
    """Partial loops and dumps."""

    title = "debugging"

    debug_rollout_only: bool = flag(False, "engines only: no trainer")
    debug_train_only: bool = flag(False, "trainer only: no engines")
    save_debug_rollout_data: str | None = flag(None, "path template with {rollout_id}: dump every rollout")
    load_debug_rollout_data: str | None = flag(
        None, "path template with {rollout_id}: train on dumps; no engines start"
    )
    load_debug_rollout_data_subsample: float | None = flag(None, "part of a dump to keep, between 0 and 1", gt=0, le=1)
    load_forge_rollout_data: str | None = flag(
        None, "dumps for slime.rollout.forge_load.generate_rollout; engines stay"
    )
    save_debug_train_data: str | None = flag(None, "path template with {rollout_id} and {rank}: dump what trainers get")
    dump_details: str | None = flag(None, "directory for both dumps and the tokenizer")


class Profiling(ArgumentGroup):
    """Profiles and memory records."""

    title = "profiling"

    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = flag(
        ["train_overall"], "parts to profile"
    )
    memory_snapshot_dir: str = flag(".", "directory of memory snapshots")
    memory_snapshot_num_steps: int | None = flag(None, "stop recording memory after this many rollouts", ge=1)
    memory_recorder: Literal["torch", "memray"] = flag("torch", "what records memory")
    record_memory_history: bool = flag(False, "record memory")


class ContinuousIntegration(ArgumentGroup):
    """Extra assertions."""

    title = "continuous integration"

    ci_test: bool = flag(False, "extra assertions")
    ci_disable_kl_checker: bool = flag(False, "leave the KL assertion out")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "largest mean difference of trainer and engine log-probs", ge=0
    )
    ci_save_grad_norm: str | None = flag(None, "path template with {role}, {rollout_id}, {step_id}")
    ci_load_grad_norm: str | None = flag(None, "path template of gradient norms to compare with")
