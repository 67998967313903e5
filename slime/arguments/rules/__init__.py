"""Checks and derivations across groups, in the order in which they depend on each other.

Every rule takes the namespace, changes it or raises ``ArgumentError`` with one sentence that names the flags and the
way out. What concerns a single flag is declared beside the flag.
"""

from __future__ import annotations

import argparse

from slime.arguments.rules import (
    algorithm,
    batches,
    checkpoints,
    debug,
    evaluation,
    hf_config,
    megatron,
    placement,
    rollout,
    sglang,
    tracking,
)

RULES = (
    debug.expand_dumps,
    debug.choose_loop,
    hf_config.check_readable,
    evaluation.resolve_datasets,
    checkpoints.fall_back_to_hf_checkpoint,
    checkpoints.resolve_load,
    checkpoints.check_save,
    algorithm.check,
    algorithm.derive,
    placement.apply_offload_shorthand,
    placement.fit_rollout_only,
    placement.share_or_split,
    placement.check_engines,
    batches.derive_global_batch_size,
    batches.check_micro_batches,
    rollout.check,
    evaluation.fall_back_to_rollout,
    tracking.check,
    sglang.derive_sizes,
    megatron.derive,
    hf_config.check_consistency,
)


def apply_rules(args: argparse.Namespace) -> None:
    """Apply every rule to ``args`` in place. Raises ``ArgumentError``."""
    for rule in RULES:
        rule(args)
