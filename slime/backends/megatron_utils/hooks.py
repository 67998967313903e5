"""The plugin functions a trainer rank calls, looked up at start so that a wrong one fails before any work."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils.hook_results import check_postprocessed
from slime.rollout.hooks.contracts import Contract
from slime.rollout.hooks.hook import Hook, checked_hook

OptionalCall = Callable[..., Any] | None

_LENGTHS = ("total_lengths", "response_lengths")
CONTRACTS: dict[str, Contract] = {
    "custom_megatron_init_path": Contract("--custom-megatron-init-path", "fn(args)", 1),
    "custom_megatron_before_log_prob_hook_path": Contract(
        "--custom-megatron-before-log-prob-hook-path", "fn(args, model, store_prefix)", 3
    ),
    "custom_megatron_before_train_step_hook_path": Contract(
        "--custom-megatron-before-train-step-hook-path",
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
        6,
    ),
    "rollout_data_postprocess_path": Contract(
        "--rollout-data-postprocess-path", "fn(args, rollout_id, rollout_data)", 3
    ),
    "custom_advantage_function_path": Contract("--custom-advantage-function-path", "fn(args, rollout_data)", 2),
    "custom_loss_function_path": Contract(
        "--custom-loss-function-path", "fn(args, batch, logits, sum_of_sample_mean)", 4
    ),
    "custom_tis_function_path": Contract(
        "--custom-tis-function-path",
        "fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw)",
        0,
        ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", *_LENGTHS),
    ),
    "custom_pg_loss_reducer_function_path": Contract(
        "--custom-pg-loss-reducer-function-path",
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)",
        4,
    ),
    "custom_update_weight_post_write_path": Contract(
        "--custom-update-weight-post-write-path", "fn(args, version_dir, rollout_engines)", 3
    ),
}
"""By the attribute of the arguments that holds the dotted path: how a trainer calls the function."""


@dataclass(frozen=True)
class TrainerHooks:
    """Resolved hooks; None where the flag is not given.

    ``after_megatron_init(args)``, ``before_log_prob(args, model, store_prefix)``,
    ``before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``,
    ``postprocess_rollout_data(args, rollout_id, rollout_data)`` (mutates the dict, which is checked afterwards).
    """

    after_megatron_init: OptionalCall = None
    before_log_prob: OptionalCall = None
    before_train_step: OptionalCall = None
    postprocess_rollout_data: OptionalCall = None


def optional_function(args: Namespace, name: str) -> Hook | None:
    """Return the function that the dotted path ``args.<name>`` names, or None when it is not given.

    Raises whatever ``load_function`` raises for a path that leads nowhere, and TypeError, with both signatures, for
    what cannot be called as its flag's function is.
    """
    path = getattr(args, name, None)
    return checked_hook(path, CONTRACTS[name], CONTRACTS[name].flag) if path else None


def load_trainer_hooks(args: Namespace) -> TrainerHooks:
    """Look up every hook of the trainer, also those that only loss and advantages call. Raises as above."""
    for name in CONTRACTS:
        optional_function(args, name)
    postprocess = optional_function(args, "rollout_data_postprocess_path")
    return TrainerHooks(
        after_megatron_init=optional_function(args, "custom_megatron_init_path"),
        before_log_prob=optional_function(args, "custom_megatron_before_log_prob_hook_path"),
        before_train_step=optional_function(args, "custom_megatron_before_train_step_hook_path"),
        postprocess_rollout_data=check_postprocessed(postprocess) if postprocess is not None else None,
    )
