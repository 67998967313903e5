"""Executions of several samples: one prompt, several conversations with the policy, one reward for all of them."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from slime.algorithms.rewards import normalize_rewards
from slime.rollout.groups import without_response
from slime.utils.types import Sample

_Settings = TypeVar("_Settings")


def settings_of(args: Namespace, kind: Callable[..., _Settings], prefix: str, prompts: Mapping[str, str]) -> _Settings:
    """Return the dataclass ``kind`` with the values that ``--custom-config-path`` sets: attributes ``<prefix><field>``.

    Its field ``prompts`` gets the texts of ``prompts``, of which the file may replace any. Raises ValueError for an
    attribute with that prefix, or a prompt, that does not exist.
    """
    given = {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}
    _refuse_unknown(given, [field.name for field in fields(kind)], prefix)  # type: ignore[arg-type]
    own = given.pop("prompts", {})
    _refuse_unknown(own, prompts, f"{prefix}prompts: ")
    return kind(**given, prompts={**prompts, **own})


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str] | Mapping[str, Any], before: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"--custom-config-path: {before}{unknown[0]} is not read by anything, expected one of "
            f"{', '.join(before + name for name in known)}"
        )


def problem_of(sample: Sample) -> str:
    """Return the text of a prompt: what its last message says, where it is a chat."""
    return sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1]["content"])


def conversation_of(sample: Sample, tokens: Sequence[int], **metadata: Any) -> Sample:
    """Return a sample that the policy is to answer, with the prompt ``tokens``: one of the execution of ``sample``.

    It has the prompt, label, indices and metadata of ``sample``, and ``metadata``. The samples of an execution share
    their ``rollout_id``: they are one trajectory in the statistics of rewards and in the batch.
    """
    one = without_response(sample)
    one.tokens, one.rollout_id, one.session_id = list(tokens), sample.index, sample.session_id
    for name in ("abort_reason", "abort_error"):  # of an earlier attempt
        one.metadata.pop(name, None)
    one.metadata |= metadata
    return one


def response_tokens(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the response of ``sample`` without the special tokens that end it."""
    end, special = len(sample.tokens), set(tokenizer.all_special_ids)
    start = end - sample.response_length
    while end > start and sample.tokens[end - 1] in special:
        end -= 1
    return sample.tokens[start:end]


def shuffled_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Deal the rewards of a rollout out at random to its executions, then normalize them as usual.

    The control of these examples, for ``--custom-reward-post-process-path``. Samples of an execution share the reward
    that it is dealt: shuffled sample by sample, rewards would differ within executions, which real ones never do.
    Returns the raw rewards as they were earned, and the normalized ones that were dealt.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    ids = [("alone", i) if s.rollout_id is None else ("shared", s.rollout_id) for i, s in enumerate(samples)]
    earned = dict(zip(ids, raw, strict=True))
    dealt = list(earned.values())
    random.Random(samples[0].index).shuffle(dealt)
    by_execution = dict(zip(earned, dealt, strict=True))
    return raw, normalize_rewards(args, samples, [by_execution[execution] for execution in ids])
