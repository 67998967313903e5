"""The plugin functions a trainer rank calls, resolved once at start so that a wrong path fails before any work."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.misc import load_function

Hook = Callable[..., Any] | None


@dataclass(frozen=True)
class TrainerHooks:
    """Resolved hooks; None where the flag is not given.

    ``after_megatron_init(args)``, ``before_log_prob(args, model, store_prefix)``,
    ``before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``,
    ``postprocess_rollout_data(args, rollout_id, rollout_data)`` (mutates the dict).
    """

    after_megatron_init: Hook = None
    before_log_prob: Hook = None
    before_train_step: Hook = None
    postprocess_rollout_data: Hook = None


# Hooks that are called from inside the loss or the advantages. They are resolved (and cached) there, but a path that
# does not exist must stop the trainer at start, not after the first rollout.
_RESOLVED_AT_USE = (
    "custom_advantage_function_path",
    "custom_loss_function_path",
    "custom_tis_function_path",
    "custom_pg_loss_reducer_function_path",
)


def optional_function(args: Namespace, name: str) -> Hook:
    """Return the function that the dotted path ``args.<name>`` names, or None when it is not given."""
    path = getattr(args, name, None)
    return load_function(path, f"--{name.replace('_', '-')}") if path else None


def load_trainer_hooks(args: Namespace) -> TrainerHooks:
    """Resolve every hook of the trainer. Raises whatever ``load_function`` raises for a path that does not resolve."""
    for name in _RESOLVED_AT_USE:
        optional_function(args, name)
    return TrainerHooks(
        after_megatron_init=optional_function(args, "custom_megatron_init_path"),
        before_log_prob=optional_function(args, "custom_megatron_before_log_prob_hook_path"),
        before_train_step=optional_function(args, "custom_megatron_before_train_step_hook_path"),
        postprocess_rollout_data=optional_function(args, "rollout_data_postprocess_path"),
    )
