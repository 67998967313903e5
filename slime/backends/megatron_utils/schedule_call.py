"""The one call of Megatron's pipeline schedules: micro-batches of a rollout through the model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from slime.backends.megatron_utils.balancing import Balancing
from slime.backends.megatron_utils.data import RolloutData, micro_batch_iterators, model_inputs
from slime.backends.megatron_utils.mtp_loss import mtp_targets, trains_mtp
from slime.backends.megatron_utils.parallel import unwrap
from slime.backends.megatron_utils.routing_replay import RoutingReplay

Finish = Callable[..., Any]
"""From the model's output to what the schedule expects: a loss and its report, or collected data."""


def run_schedule(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    data: RolloutData,
    micro_batches: list[list[int]],
    finish: Callable[[dict[str, Any]], Finish],
    *,
    forward_only: bool,
    routing: RoutingReplay | None = None,
    balancing: Balancing | None = None,
) -> list[Any]:
    """Run ``micro_batches`` (lists of local sample positions) through ``model``, backward too unless ``forward_only``.

    ``finish(batch)`` returns the function of the output for that micro-batch. Returns what those functions reported,
    one entry per micro-batch on the last pipeline stage, nothing elsewhere; with ``forward_only`` whatever they
    returned, as non-loss data. ``routing`` and ``balancing`` are given the batch of each forward pass.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, chunk: torch.nn.Module, return_schedule_plan: bool = False) -> Any:
        batch = next(iterator)
        inputs = model_inputs(batch)
        if not forward_only and trains_mtp(args) and hasattr(unwrap(chunk), "mtp"):
            inputs["mtp_targets"] = batch.mtp_targets = mtp_targets(args, batch)
        batch.overwrite_logits = _needs_no_logits(chunk)
        with ExitStack() as stack:
            for part in (routing, balancing):
                if part is not None:
                    stack.enter_context(part.forward(batch))
            output = chunk(**inputs)
        return output, finish(batch)

    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=micro_batch_iterators(args, data, micro_batches, len(model)),
        model=list(model),
        num_microbatches=len(micro_batches),
        seq_length=args.seq_length or 1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return reports


def _needs_no_logits(chunk: torch.nn.Module) -> bool:
    """Return whether the model says that its backward pass does not read its output; a user's own may end in a tanh."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    model: Any = chunk
    while isinstance(model, DistributedDataParallel | Float16Module):  # not a wrapper of the user's
        model = model.module
    return getattr(model, "logits_may_be_overwritten", False)
