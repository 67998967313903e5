"""Values of single roles (``--megatron-config-path``)."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import roles as role_args
from slime.arguments import unchecked
from slime.arguments.command_line import all_flags
from slime.arguments.errors import ArgumentError
from slime.arguments.files.role_config import CRITIC_OPTION, OPTION, overrides_of, read_roles

# Ranks of actor and critic with the same number work on the same samples, and values go from one to the other.
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "use_tp_pp_dp_mapping",
)
# Batches are divided once, for both.
BATCHES = (
    "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "micro_batch_size",
    "use_dynamic_batch_size", "max_tokens_per_gpu", "balance_data", "balance_by_flops", "num_steps_per_rollout",
    "advantage_estimator", "num_critic_only_steps",
)  # fmt: skip
WHOLE_RUN = {
    "cluster and placement", "rollout generation", "data", "evaluation", "reward", "weight synchronisation", "logging",
    "configuration", "debugging", "fault tolerance", "external engines", "SGLang server", "router", "teacher server",
}  # fmt: skip
"""Groups of flags that no role reads."""
OF_TRAINERS = {
    "hf_checkpoint", "model_name", "rollout_temperature", "rollout_data_postprocess_path", "distributed_backend",
    "distributed_timeout_minutes", "log_multi_turn", "log_passrate", "log_correct_samples", "save_debug_train_data",
    "update_weight_buffer_size",
}  # fmt: skip
"""Flags of those groups that trainers do read."""


def check(args: Namespace) -> None:
    """The file must be right before anything starts; the roles read it when they do."""
    if args.critic_overrides and not args.use_critic:
        unchecked.warn(args, f"{CRITIC_OPTION} has no effect without --advantage-estimator ppo")
    if args.megatron_config_path is None:
        return
    roles = read_roles(args.megatron_config_path, warn=lambda message: unchecked.warn(args, message))
    if role_args.CRITIC in roles and not args.use_critic:
        unchecked.warn(
            args,
            f"--megatron-config-path {args.megatron_config_path}: the values of role critic have no effect without "
            "--advantage-estimator ppo",
        )


def check_together(args: Namespace) -> None:
    """Actor and critic must divide ranks and batches alike, and save to places of their own.

    After the rules that derive sizes.
    """
    if args.debug_rollout_only:
        return
    for role in (role_args.ACTOR, role_args.CRITIC):
        _check_overrides(args, role)
    if not args.use_critic:
        return
    if not args.compute_advantages_and_returns or args.loss_type == "sft_loss":
        other = "--loss-type sft_loss" if args.loss_type == "sft_loss" else "--disable-compute-advantages-and-returns"
        raise ArgumentError(
            f"--advantage-estimator ppo trains a critic for advantages that {other} does not use; leave one of them out"
        )
    actor, critic = role_args.actor_args(args), role_args.critic_args(args)
    for name in LAYOUT:
        mine, theirs = getattr(actor, name, None), getattr(critic, name, None)
        if mine != theirs:
            raise ArgumentError(
                f"{_file(args)}{name} is {mine} for the actor and {theirs} for the critic: their ranks work on the "
                "same samples and hand values over, so both need the same; give it on the command line"
            )
    name = "virtual_pipeline_model_parallel_size"
    if getattr(critic, name, None) not in (None, getattr(actor, name, None)):
        raise ArgumentError(
            f"{_file(args)}{name} is {getattr(actor, name, None)} for the actor and {getattr(critic, name)} for the "
            "critic: micro-batches are counted for the actor's stages; use the same, or none for the critic"
        )
    if critic.save is not None and critic.save == actor.save:
        raise ArgumentError(
            f"{_file(args)}actor and critic would both write their checkpoints to --save {actor.save}; give the critic "
            f"another one, or leave its save out for {actor.save}/critic"
        )


def _check_overrides(args: Namespace, role: str) -> None:
    overrides = overrides_of(args, role)
    where = f"{OPTION} {args.megatron_config_path}, role {role}" if args.megatron_config_path else CRITIC_OPTION
    for name in BATCHES:
        if name in overrides and overrides[name] != getattr(args, name):
            raise ArgumentError(
                f"{where}: {name} is {overrides[name]} and {getattr(args, name)} for the run, but a rollout is divided "
                "into batches once for all roles; give it on the command line"
            )
    groups = {flag.dest: flag.group for flag in all_flags()} if overrides else {}
    idle = [name for name in overrides if groups.get(name) in WHOLE_RUN and name not in OF_TRAINERS]
    if idle:
        unchecked.warn(
            args,
            f"{where}: {', '.join(idle)}: what concerns the whole run has no effect in a role; give it on the command "
            "line",
        )


def _file(args: Namespace) -> str:
    return f"{OPTION} {args.megatron_config_path}: " if args.megatron_config_path else ""
