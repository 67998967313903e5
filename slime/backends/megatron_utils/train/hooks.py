"""The plugin functions of the trainer: how they are loaded, and what they must return."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.train.cp_utils import Reducer, ResponseLayout
from slime.backends.megatron_utils.train.data import sample_name
from slime.batching.ragged_tensor import as_lists
from slime.rollout.hooks.contracts import contracts_of
from slime.rollout.hooks.hook import Hook, checked_hook

OptionalCall = Callable[..., Any] | None

CONTRACTS = contracts_of("trainer")
"""By the attribute of the arguments that holds the dotted path: how a trainer calls the function."""
REDUCER_KEYWORDS = CONTRACTS["custom_pg_loss_reducer_function_path"].offered
"""Per-sample columns that a reducer of the user's is given where it takes them."""


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


def optional_function(args: Args, name: str) -> Hook | None:
    """Return the function that the dotted path ``args.<name>`` names, or None when it is not given.

    Raises what ``load_function`` raises for a path that leads nowhere, and TypeError, with both signatures, for
    what cannot be called as its flag's function is.
    """
    path = getattr(args, name, None)
    return checked_hook(path, CONTRACTS[name], CONTRACTS[name].flag) if path else None


def load_trainer_hooks(args: Args) -> TrainerHooks:
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


logger = logging.getLogger(__name__)


def checked_loss(hook: Hook, result: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what ``--custom-loss-function-path`` gave: (scalar loss, scalar metrics by name). Raises TypeError."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise _wrong(hook, _brief(result), "(loss, metrics)")
    loss, metrics = result
    if not torch.is_tensor(loss) or loss.numel() != 1:
        raise _wrong(hook, _brief(loss), "a loss that is a tensor with one number; reduce it by sum_of_sample_mean")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong(hook, _brief(loss), "a loss that depends on the logits; was it detached?")
    if not isinstance(metrics, Mapping):
        raise _wrong(hook, _brief(metrics), "metrics that are a dict of names and scalar tensors")
    for name, value in metrics.items():
        number = isinstance(value, Real) or (torch.is_tensor(value) and value.numel() == 1)
        if not isinstance(name, str) or not number:
            raise _wrong(hook, f"metric {name!r}: {_brief(value)}", "one number per metric, and names that are str")
    return loss, dict(metrics)


def checked_correction(
    hook: Hook, result: object, pg_loss: Tensor, loss_masks: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return what ``--custom-tis-function-path`` gave for ``pg_loss`` [n] and whole masks. Raises TypeError."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise _wrong(hook, _brief(result), "(pg_loss, loss_masks, metrics)")
    loss, masks, metrics = result
    if not torch.is_tensor(loss) or loss.shape != pg_loss.shape:
        raise _wrong(hook, _brief(loss), f"a pg_loss of shape {tuple(pg_loss.shape)}, one number per local token")
    if pg_loss.requires_grad and not loss.requires_grad:  # Megatron would leave the backward pass out, and say nothing
        raise _wrong(hook, _brief(loss), "a pg_loss that depends on the one it was given; was it detached?")
    shapes = [tuple(mask.shape) for mask in loss_masks]
    given = [_shape(mask) for mask in masks] if isinstance(masks, (list, tuple)) else _brief(masks)
    if given != shapes:
        raise _wrong(
            hook, f"loss_masks {given}", f"loss_masks of the shapes {shapes}: one per sample, for the whole response"
        )
    if not isinstance(metrics, Mapping):
        raise _wrong(hook, _brief(metrics), "metrics that are a dict of names and per-token tensors")
    for name, values in metrics.items():
        if _shape(values) != tuple(pg_loss.shape):
            raise _wrong(
                hook, f"metric {name!r}: {_brief(values)}", f"one value per local token, shape {tuple(pg_loss.shape)}"
            )
    return loss, list(masks), dict(metrics)


def checked_reducer(hook: Hook, reduce: object) -> Reducer:
    """Return what ``--custom-pg-loss-reducer-function-path`` gave, which says so when it gives no scalar."""
    if not callable(reduce):
        raise _wrong(hook, _brief(reduce), "a function: per-token values of the micro-batch -> scalar")

    def reduce_to_scalar(values: Tensor) -> Tensor:
        with hook.naming():
            result = reduce(values)
        if not torch.is_tensor(result) or result.numel() != 1:
            raise _wrong(hook, f"a function that returns {_brief(result)}", "a tensor with one number")
        if values.requires_grad and not result.requires_grad:
            given, expected = f"a function that returns {_brief(result)}", "one that depends on the values"
            raise _wrong(hook, given, f"{expected}; was it detached?")
        return result.reshape(())

    return reduce_to_scalar


def check_postprocessed(hook: Hook) -> Callable[[Args, int, dict[str, Any]], None]:
    """Return ``--rollout-data-postprocess-path`` so that it raises when it leaves columns that cannot be trained on."""

    def postprocess(args: Args, rollout_id: int, data: dict[str, Any]) -> None:
        before = len(data["tokens"])
        as_lists(data)
        result = hook(args, rollout_id, data)
        if result is not None and result is not data:
            logger.warning("%s returned %s, which is not used: it changes rollout_data in place", hook, _brief(result))
        if len(data["tokens"]) != before:
            raise ValueError(
                f"{hook} left {len(data['tokens'])} of {before} samples, but the schedule is made for all of them; set "
                "their loss_masks to 0 instead"
            )
        if args.loss_type != "custom_loss":  # the user's loss may want them in another form
            check_token_columns(hook, data, [name for name in ("advantages", "returns") if name in data])

    return postprocess


def check_token_columns(hook: Hook, data: dict[str, Any], names: Sequence[str]) -> None:
    """Check columns with a tensor [n_local] per sample. Raises ValueError naming hook and sample.

    Numbers that are not finite are the step's to find: ``--no-check-for-nan-in-loss-and-grad`` skips such steps.
    """
    expected = ResponseLayout.of(data).local_lengths()
    for name in names:
        column = data[name]
        if not isinstance(column, (list, tuple)) or len(column) != len(expected):
            raise ValueError(f"{hook} set {name} to {_brief(column)}; expected a list of {len(expected)} tensors")
        for position, (values, count) in enumerate(zip(column, expected, strict=True)):
            if _shape(values) != (count,) or not values.is_floating_point():
                raise ValueError(
                    f"{hook} set {name} of {sample_name(data, position)} to {_brief(values)}; expected {count} "
                    "floating-point numbers, one per response token of this rank"
                )


def _shape(values: object) -> tuple[int, ...] | None:
    return tuple(values.shape) if torch.is_tensor(values) else None


def _wrong(hook: Hook, seen: str, expected: str) -> TypeError:
    return TypeError(f"{hook} returned {seen}; expected {expected}")


def _brief(value: object) -> str:
    if torch.is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"
