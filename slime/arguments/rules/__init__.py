"""Checks and derivations across groups, in the order in which they depend on each other.

Every rule takes the namespace, changes it or raises ``ArgumentError`` with one sentence that names the flags and the
way out. What concerns a single flag is declared beside the flag.
"""

from __future__ import annotations

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import (
    algorithm,
    checkpoints,
    data,
    debug,
    experts,
    hf_config,
    loop,
    lora,
    megatron,
    model_defaults,
    mtp,
    optimizer,
    parallelism,
    placement,
    quantization,
    roles,
    rollout,
    sglang,
    silenced,
    weight_sync,
)

RULES = (
    sglang.set_lacking,
    debug.choose_serving,
    debug.choose_log_probs,
    debug.expand_dumps,
    debug.check_templates,
    debug.choose_loop,
    hf_config.check_readable,
    hf_config.check_trained,
    model_defaults.take_from_checkpoint,
    data.resolve_datasets,
    checkpoints.fall_back_to_hf_checkpoint,
    checkpoints.resolve_load,
    debug.check_replay,
    algorithm.check,
    algorithm.derive,
    algorithm.check_distillation,
    mtp.check,
    roles.check,
    placement.apply_offload_shorthand,
    placement.check_deployment,
    placement.fit_rollout_only,
    placement.resolve_colocation,
    placement.check_engines,
    placement.count_engines,
    placement.check_elastic,
    placement.check_models,
    weight_sync.check,
    lora.check,
    checkpoints.check_save,
    parallelism.derive_global_batch_size,
    parallelism.check_micro_batches,
    rollout.check,
    rollout.check_top_p,
    loop.check_staleness,
    data.check_prompts,
    data.check_media,
    rollout.check_environments,
    rollout.check_reward,
    data.fall_back_to_rollout,
    silenced.check_needs,
    silenced.check,
    debug.check_profiling,
    sglang.take_keys,
    sglang.derive_sizes,
    hf_config.check_served_model,
    quantization.check_pushes,
    quantization.check_training,
    quantization.check_fp8,
    megatron.derive,
    checkpoints.check_format,
    experts.check_routing_replay,
    model_defaults.warn_of_dropout,
    optimizer.check,
    megatron.set_field_names,
    roles.derive,
    algorithm.check_advantages,
    hf_config.check_consistency,
    algorithm.check_teacher_architecture,
)


def apply_rules(args: Args) -> None:
    """Apply every rule to ``args`` in place. Raises ``ArgumentError``; what is missing is said all at once."""
    if not hasattr(args, "explicit_flags"):  # a namespace of a tool's own parser, see get_slime_extra_args_provider
        args.explicit_flags = frozenset()
    for rule in RULES:
        try:
            rule(args)
        except ArgumentError as error:
            if not diagnostics.missing_flags(args):
                raise
            # Not where it may be about what stands in for something that is missing.
            if not {"hf_checkpoint", "rollout_batch_size"}.intersection(diagnostics.missing_flags(args)):
                diagnostics.missing_flags(args)[""] = str(error)
            break
    if messages := diagnostics.missing_flags(args).values():
        raise ArgumentError("\n".join(messages))
