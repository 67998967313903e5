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
    companions,
    debug,
    deployment,
    distillation,
    engine_groups,
    evaluation,
    hf_config,
    megatron,
    nuclei,
    optimizer,
    placement,
    prediction,
    profiling,
    prompts,
    quantization,
    reward,
    roles,
    rollout,
    routing_replay,
    served_model,
    sglang,
    staleness,
    teacher_server,
    templates,
    weight_sync,
)

RULES = (
    teacher_server.read_environment,
    debug.expand_dumps,
    templates.check,
    debug.choose_loop,
    hf_config.check_readable,
    evaluation.resolve_datasets,
    checkpoints.fall_back_to_hf_checkpoint,
    checkpoints.resolve_load,
    debug.check_replay,
    algorithm.check,
    algorithm.derive,
    distillation.check,
    prediction.check,
    roles.check,
    placement.apply_offload_shorthand,
    deployment.check,
    placement.fit_rollout_only,
    placement.share_or_split,
    placement.check_engines,
    engine_groups.check,
    weight_sync.check,
    checkpoints.check_save,
    batches.derive_global_batch_size,
    batches.check_micro_batches,
    rollout.check,
    nuclei.check,
    staleness.check,
    prompts.check,
    reward.check,
    evaluation.fall_back_to_rollout,
    companions.check,
    profiling.check,
    sglang.derive_sizes,
    served_model.check,
    quantization.check,
    megatron.derive,
    routing_replay.check,
    optimizer.check,
    roles.check_together,
    algorithm.check_advantages,
    hf_config.check_consistency,
    distillation.check_architecture,
)


def apply_rules(args: argparse.Namespace) -> None:
    """Apply every rule to ``args`` in place. Raises ``ArgumentError``."""
    for rule in RULES:
        rule(args)
