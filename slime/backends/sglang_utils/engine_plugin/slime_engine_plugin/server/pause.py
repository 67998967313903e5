"""Behavior of a paused engine.

It can flush the prefix cache while requests wait, so that they survive a weight update.

``POST /pause_generation {"mode": "retract"}`` takes all running requests off the batch, frees their KV cache and puts
them into the waiting queue with the tokens they have. A stock server then refuses to flush (400), because it asks for
an empty waiting queue too: the prefix tree would keep values of the old weights. A request in the queue of a paused
engine holds no cache, so flushing is safe; after ``/continue_generation`` it is prefilled again under the new
weights.

It is idle as soon as it has replied to the last request. A stock scheduler keeps requests that have ended in its
batches until its next turn, and one that receives a weight update with ``flush_cache`` in between ends with an
AssertionError.

It can be asked again to release or to resume what is released or resumed already, as after a reply that was lost: a
stock scheduler ends with a KeyError then, or reads weights that are gone.

With ``--sleep-on-idle`` it sleeps until something is received, as an idle engine does: a stock scheduler polls without
a break while it is paused, and takes a core from the trainer that sends the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager


def flush_with_waiting_requests(
    flush_cache: Callable[..., bool], scheduler: Scheduler, *args: object, **kwargs: object
) -> bool:
    """Around ``Scheduler.flush_cache``: do not count what has ended; of a paused engine, nor what holds no KV cache."""
    if not scheduler.enable_overlap:  # else what has ended may be in a batch that is running
        take_off_ended_requests(scheduler)
    waiting = scheduler.waiting_queue
    may_hide = (
        scheduler._engine_paused
        and scheduler.disaggregation_mode == DisaggregationMode.NULL
        and not any(request.kv.holds_kv for request in waiting)
    )
    if not (waiting and may_hide):
        return flush_cache(scheduler, *args, **kwargs)
    scheduler.waiting_queue = []
    try:
        flushed = flush_cache(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = waiting
    if flushed:
        forget_prefix_matches(waiting)
    return flushed


def take_off_ended_requests(scheduler: Scheduler) -> None:
    """Take them off the batches, as the next turn of the scheduler's loop does."""
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None and batch.reqs and all(request.finished() for request in batch.reqs):
            batch.filter_batch()
            scheduler.running_batch.batch_is_full = False


def forget_prefix_matches(requests: list[Any]) -> None:
    """Drop what the scheduling policy remembers of the old tree; the match is repeated when a request is scheduled."""
    import torch

    for request in requests:
        request.prefix_indices = torch.empty((0,), dtype=torch.int64)
        request.last_node = None
        request.num_matched_prefix_tokens = 0


def sleep_while_paused(result: None, scheduler: Scheduler) -> None:
    """After ``Scheduler._record_scheduler_state_for_paused_engine``, in every turn of the loop of a paused engine."""
    if scheduler.disaggregation_mode == DisaggregationMode.NULL:
        scheduler.maybe_sleep_on_idle()  # until something is received, or for a second


def release_once(
    release: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: ReleaseMemoryOccupationReqInput
) -> Any:
    """Around ``SchedulerWeightUpdaterManager.release_memory_occupation``: release what is not released already."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    request.tags = [tag for tag in _tags(request) if tag not in updater.offload_tags]
    return release(updater, request) if request.tags else ReleaseMemoryOccupationReqOutput()


def resume_once(
    resume: Callable[..., Any], updater: SchedulerWeightUpdaterManager, request: ResumeMemoryOccupationReqInput
) -> Any:
    """Around ``SchedulerWeightUpdaterManager.resume_memory_occupation``: resume what is released."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    request.tags = [tag for tag in _tags(request) if tag in updater.offload_tags]
    return resume(updater, request) if request.tags else ResumeMemoryOccupationReqOutput()


def _tags(request: ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput) -> list[str]:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(request.tags or GPU_MEMORY_ALL_TYPES)


def register(on_cpu: bool) -> None:
    """Register the hooks."""
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.release_memory_occupation", release_once, HookType.AROUND)
    HookRegistry.register(f"{updater}.resume_memory_occupation", resume_once, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache", flush_with_waiting_requests, HookType.AROUND
    )
    if on_cpu:
        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
            sleep_while_paused,
            HookType.AFTER,
        )
