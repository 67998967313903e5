"""The types that rollout functions return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.rollout.hooks.hook import describe, finish
from slime.utils.types import Sample, iter_samples

__all__ = [
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "call_rollout_fn",
    "check_sibling_rollout_ids",
    "iter_samples",
]


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on (prompt x trajectory, or prompt x trajectory x siblings), and metrics to log."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """``{data set: {"rewards": [...], "truncated": [...], "samples": [...]}}``, and metrics to log."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: object, evaluation: bool, **kwargs: object
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a (coroutine) function that makes rollouts; wrap what older ones return: a list of groups, or a dict.

    Raises TypeError, naming the function, for anything else, and for what is no sample in it.
    """
    output = finish(fn(*args, **kwargs, evaluation=evaluation))
    if evaluation and isinstance(output, dict):
        output = RolloutFnEvalOutput(data=output)
    if not evaluation and isinstance(output, list):
        output = RolloutFnTrainOutput(samples=output)
    if not isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        expected = "RolloutFnEvalOutput or dict" if evaluation else "RolloutFnTrainOutput or list"
        raise TypeError(
            f"{describe(fn)} returned {type(output).__name__} with evaluation={evaluation}; expected {expected}"
        )
    if isinstance(output, RolloutFnTrainOutput):
        _check_groups(fn, output.samples)
    elif evaluation:
        _check_results(fn, output.data)
    return output


def _check_groups(fn: Callable[..., Any], groups: object) -> None:
    if not isinstance(groups, (list, tuple)):
        raise TypeError(f"{describe(fn)} returned {type(groups).__name__} as its samples; expected a list of groups")
    for number, group in enumerate(groups):
        odd = next((leaf for leaf in iter_samples(group) if not isinstance(leaf, Sample)), None)
        if odd is not None:
            raise TypeError(
                f"{describe(fn)} returned {type(odd).__name__} {odd!r:.80} in group {number} of {len(groups)}; "
                "expected lists of Sample"
            )


def _check_results(fn: Callable[..., Any], data: object) -> None:
    expected = '{data set: {"rewards": [...], "truncated": [...], "samples": [...]}}'
    if not isinstance(data, Mapping):
        raise TypeError(f"{describe(fn)} returned {type(data).__name__} as its evaluation data; expected {expected}")
    for name, result in data.items():
        if not isinstance(result, Mapping) or "rewards" not in result:
            seen = f"the keys {sorted(map(str, result))}" if isinstance(result, Mapping) else type(result).__name__
            raise TypeError(f"{describe(fn)} returned {seen} for evaluation data set {name!r}; expected {expected}")


def check_sibling_rollout_ids(nested: object, depth: int = 0) -> None:
    """Assert that siblings of one trajectory share a rollout id.

    A list of samples nested two or more levels deep, with more than one sample, must have equal ``rollout_id``s that
    are not None. Raises AssertionError naming the samples.
    """
    if not isinstance(nested, list) or not nested:
        return
    if isinstance(nested[0], list) or any(isinstance(item, list) for item in nested):
        for item in nested:
            check_sibling_rollout_ids(item, depth + 1)
        return
    if depth >= 2 and len(nested) > 1:
        ids = [sample.rollout_id for sample in nested]
        shared = ids[0] is not None and len(set(ids)) == 1
        assert shared, (
            f"{len(nested)} samples of one trajectory (indices {[s.index for s in nested]}) must share one rollout_id, "
            f"got {ids}. Set sample.rollout_id in the generate function that returns a list of samples."
        )
