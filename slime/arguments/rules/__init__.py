"""Checks and derivations across groups, in the order in which they depend on each other.

Every rule takes the namespace, changes it or raises ``ArgumentError`` with one sentence that names the flags and the
way out. What concerns a single flag is declared beside the flag.
"""

from __future__ import annotations

import argparse

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
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
    model_defaults,
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
    top_p_mask,
    weight_sync,
)

RULES = (
    teacher_server.read_environment,
    debug.expand_dumps,
    templates.check,
    debug.choose_loop,
    hf_config.check_readable,
    model_defaults.take_from_checkpoint,
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
    top_p_mask.check,
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
    model_defaults.warn_of_dropout,
    optimizer.check,
    roles.check_together,
    algorithm.check_advantages,
    hf_config.check_consistency,
    distillation.check_architecture,
)


def apply_rules(args: argparse.Namespace) -> None:
    """Apply every rule to ``args`` in place. Raises ``ArgumentError``; what is missing is said all at once."""
    for rule in RULES:
        try:
            rule(args)
        except ArgumentError as error:
            if not unchecked.needed(args):
                raise
            if _is_known(args):
                unchecked.needed(args)[""] = str(error)
            break
    if messages := unchecked.needed(args).values():
        raise ArgumentError("\n".join(messages))


def _is_known(args: argparse.Namespace) -> bool:
    """Whether what the rules say next is about what was given, not about what stands in for what is missing."""
    return not {"hf_checkpoint", "rollout_batch_size"}.intersection(unchecked.needed(args))
