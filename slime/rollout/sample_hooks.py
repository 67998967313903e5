"""Hooks between generation and reward (``--rollout-sample-hook-path``)."""

from __future__ import annotations

from typing import Any

from slime.arguments.args import Args
from slime.rollout.hooks.hook import Hook, make_hook
from slime.utils.declared import with_defaults
from slime.utils.misc import load_function
from slime.utils.types import Sample

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Say which rollout is in progress in this process, for the hooks of code that does not pass its id on."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(
    args: Args, value: Sample | list[Any], *, rollout_id: int | None = None, evaluation: bool = False, **offered: object
) -> Any:
    """Run the hooks as ``apply_sample_hooks`` does; without a ``rollout_id`` it is that of the rollout in progress.

    Hooks are passed those of the further keywords that they accept, too.
    """
    args = with_defaults(args)
    rollout_id = _current_rollout_id if rollout_id is None else rollout_id
    return await apply_sample_hooks(args, value, rollout_id=rollout_id, evaluation=evaluation, **offered)


async def apply_sample_hooks(
    args: Args,
    samples: Sample | list[Any],
    *,
    rollout_id: int | None = None,
    evaluation: bool = False,
    **offered: object,
) -> Any:
    """Run every hook, in flag order, on each sample of the nested list ``samples``; return the same nesting.

    A hook may be sync or async and returns the sample to continue with, or None to keep the one it was given. It is
    passed those of ``rollout_id``, ``evaluation`` and what is ``offered`` that it accepts. Raises TypeError for any
    other return value.
    """
    offered |= {"rollout_id": rollout_id, "evaluation": evaluation}
    paths = args.rollout_sample_hook_path or []
    for path in [paths] if isinstance(paths, str) else paths:
        samples = await _apply(make_hook(path, "rollout_sample_hook_path", load=load_function), args, samples, offered)
    return samples


async def _apply(hook: Hook, args: Args, samples: Sample | list[Any], offered: dict[str, Any]) -> Any:
    if isinstance(samples, (list, tuple)):
        return [await _apply(hook, args, sample, offered) for sample in samples]
    result = await hook.awaited(args, samples, **hook.accepted(**offered))
    if result is None:
        return samples
    if not isinstance(result, Sample):
        raise hook.returned(result, "a Sample, or None to keep the one it was given", samples)
    return result
