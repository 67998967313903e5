"""Calling the function that generates for one sample (``--custom-generate-function-path``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.group_copy import copy_sample
from slime.rollout.hooks.hook import Hook, make_hook
from slime.utils.types import Sample

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

    A plain function runs in a thread of its own, on a copy of the sample that replaces it when it is done: one that is
    cancelled cannot be stopped, and changes nothing any more. One that makes tasks of the event loop runs there. Raises
    TypeError, naming the function and the sample, for anything else than samples.
    """
    hook = fn if isinstance(fn, Hook) else _hook_of(fn)
    asked_for = {"evaluation": evaluation} if hook.has_parameter("evaluation") else {}
    if hook.stays_on_loop:
        result = await hook.awaited(args, sample, sampling_params, **asked_for)
    else:
        own = copy_sample(sample)
        own.trace = sample.trace  # open spans are closed in it
        result = await hook.awaited_off_loop(args, own, sampling_params, **asked_for)
        if any(leaf is own for leaf in iter_samples(result)):
            sample.__dict__.clear()
            sample.__dict__.update(own.__dict__)
        result = _replaced(result, own, sample)
    if not all(isinstance(leaf, Sample) for leaf in iter_samples(result)):
        raise hook.returned(result, "a Sample, or a list of Samples (which may be nested)", sample)
    return result if isinstance(result, Sample) else _as_lists(result)


@functools.lru_cache(8)
def _hook_of(fn: Callable[..., Any]) -> Hook:
    """Its signature is looked at once, not for every sample."""
    return Hook("the generate function", getattr(fn, "__qualname__", ""), fn)


def _replaced(result: Any, old: Any, new: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_replaced(item, old, new) for item in result]
    return new if result is old else result


def _as_lists(result: Any) -> Any:
    return [_as_lists(item) for item in result] if isinstance(result, (list, tuple)) else result
