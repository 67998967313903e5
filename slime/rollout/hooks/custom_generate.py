"""Calling the function that generates for one sample (``--custom-generate-function-path``)."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from typing import Any

from slime.rollout.cancelling import end_if_cancelled
from slime.rollout.groups import copy_sample, has_aborted
from slime.rollout.hooks.hook import Hook, make_hook
from slime.utils.types import Sample, iter_samples

_NAME = "custom_generate_function_path"


def generate_hook(args: Any, sample: Sample, load: Callable[[str], Any]) -> Hook | None:
    """Return the generate function of ``sample``: its own, else that of the run; None for the built-in one."""
    if sample.generate_function_path:
        return make_hook(sample.generate_function_path, _NAME, "generate_function_path of the sample", load)
    path = args.custom_generate_function_path
    return make_hook(path, _NAME, load=load) if path else None


async def call_generate(
    fn: Hook | Callable[..., Any], args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Any]:
    """Return what ``fn(args, sample, sampling_params[, evaluation=...])`` makes of ``sample``: one, or a nested list.

    A coroutine function runs on the event loop. A plain function runs in a thread, on a copy of the sample that
    replaces it at the end: a thread cannot be stopped, and one that was cancelled must not change the sample later.

    With ``partial_rollout`` a hook whose attribute ``resumable`` is not true starts again from the sample as it was,
    when it is cancelled or one of several samples that it returns was aborted. Raises TypeError, naming the function
    and the sample, for a result that is not samples.
    """
    hook = fn if isinstance(fn, Hook) else _hook_of(fn)
    keywords = {"evaluation": evaluation} if hook.has_parameter("evaluation") else {}
    restarts = hook is fn and not evaluation and args.partial_rollout and not getattr(fn.function, "resumable", False)
    original = copy.deepcopy(sample) if restarts else None
    own = sample
    try:
        if hook.is_async:
            with hook.naming(sample):
                result = await hook.function(args, sample, sampling_params, **keywords)
        else:
            own = copy_sample(sample)
            own.trace = sample.trace  # open spans are closed in it
            result = await hook.awaited_off_loop(args, own, sampling_params, **keywords)
        end_if_cancelled()
    except asyncio.CancelledError:
        if original is not None:
            _overwrite(sample, original)
        raise
    if own is not sample:
        if any(leaf is own for leaf in iter_samples(result)):
            _overwrite(sample, own)
        result = _replaced(result, own, sample)
    if not all(isinstance(leaf, Sample) for leaf in iter_samples(result)):
        raise hook.returned(result, "a Sample, or a list of Samples (which may be nested)", sample)
    if original is not None and not isinstance(result, Sample) and has_aborted(result):
        _overwrite(sample, original)
        sample.status = Sample.Status.ABORTED
        return sample
    return result if isinstance(result, Sample) else _as_lists(result)


def _overwrite(sample: Sample, other: Sample) -> None:
    sample.__dict__.clear()
    sample.__dict__.update(other.__dict__)


@functools.lru_cache(8)
def _hook_of(fn: Callable[..., Any]) -> Hook:
    """Inspect its signature once, not for every sample."""
    return Hook("the generate function", getattr(fn, "__qualname__", ""), fn)


def _replaced(result: Any, old: Any, new: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_replaced(item, old, new) for item in result]
    return new if result is old else result


def _as_lists(result: Any) -> Any:
    return [_as_lists(item) for item in result] if isinstance(result, (list, tuple)) else result
