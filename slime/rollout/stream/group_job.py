"""One group on its way through the fully asynchronous rollout, and how to begin it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.group_copy import copy_sample
from slime.utils.types import Sample

Group = list[Any]

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
_OF_A_RESPONSE = ("start_rollout_id", "reward_error")
"""What rollouts note in a sample's metadata."""
_OF_A_PROMPT = (
    "group_index",
    "index",
    "prompt",
    "multimodal_inputs",
    "apply_chat_template_kwargs",
    "label",
    "generate_function_path",
    "custom_rm_path",
)


@dataclass
class GroupJob:
    """A group that was drawn from the data source and has not been consumed.

    ``original`` is never handed to generation, which gets copies: whatever happens there, the group can begin again.
    ``step`` is that of the engines' weights at the start, ``oldest`` that of the oldest trained token of ``result``.
    ``failures`` and ``expired`` count how often it raised and was too old.
    """

    original: Group
    number: int = 0
    step: int | None = None
    oldest: int | None = None
    result: Group | None = None
    failures: int = 0
    expired: int = 0
    started: float = field(default_factory=time.monotonic)

    def name(self) -> str:
        """Say which group this is."""
        samples = list(iter_samples(self.original))
        group_index = samples[0].group_index if samples else None
        return f"group {group_index} (samples {[sample.index for sample in samples]})"

    def to_save(self) -> Group:
        """Return what a checkpoint keeps: the result, unless only the original tells how to begin again."""
        flat = self.result is not None and all(isinstance(sample, Sample) for sample in self.result)
        return self.result if flat and self.result is not None else self.original


def first_group_index(group: Group) -> int:
    """Return the number that the data source gave to a group; -1 when it gave none."""
    first = next(iter_samples(group), None)
    return -1 if first is None or first.group_index is None else first.group_index


def is_complete(group: Group) -> bool:
    """True when every sample has its response and its reward."""
    return all(s.status in FINISHED and s.reward is not None for s in iter_samples(group))


def has_aborted(group: Group) -> bool:
    """True when a sample was aborted."""
    return any(sample.status == Sample.Status.ABORTED for sample in iter_samples(group))


def without_response(old: Sample) -> Sample:
    """Return the sample as its prompt was. It is another object: a reward of the response may still be on its way."""
    sample = copy_sample(old)
    if sample.response_length:
        sample.tokens = list(sample.tokens[: len(sample.tokens) - sample.response_length])
    blank = Sample()
    for name in (
        "response",
        "response_length",
        "reward",
        "loss_mask",
        "weight_versions",
        "weight_version_spans",
        "rollout_log_probs",
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "remove_sample",
        "teacher_log_probs",
        "status",
        "session_id",
        "non_generation_time",
        "spec_info",
        "prefix_cache_info",
    ):
        setattr(sample, name, getattr(blank, name))
    sample.metadata = {name: value for name, value in (sample.metadata or {}).items() if name not in _OF_A_RESPONSE}
    return sample


def forget_too_old(group: Group, is_too_old: Callable[[Any], bool]) -> int:
    """Let those of a group's samples (or fan-outs) begin again that are too old; return the number of tokens lost."""
    lost = 0
    for number, item in enumerate(group):
        if is_too_old(item):
            lost += sum(sample.response_length for sample in iter_samples(item))
            group[number] = _prompt_of(item)
    return lost


def note_prompt(result: Any, prompt: Any) -> None:
    """Keep what the first sample of a fan-out lacks of ``prompt``, if it was made anew: the fan-out may begin again."""
    first = next(iter_samples(result), prompt)
    if first is prompt or not isinstance(result, list) or result is prompt:  # a fan-out that came back, the last
        return
    blank: tuple[Any, ...] = (None, "", {})
    lacks = {name: getattr(prompt, name) for name in _OF_A_PROMPT if getattr(first, name) in blank}
    lacks = {name: value for name, value in lacks.items() if value not in blank}
    known = (*(first.metadata or {}), *_OF_A_RESPONSE)
    if metadata := {name: value for name, value in (prompt.metadata or {}).items() if name not in known}:
        lacks["metadata"] = metadata
    if lacks:
        first.__dict__["of_prompt"] = lacks


def _prompt_of(item: Any) -> Any:
    """Return a sample without its response; of a fan-out the first one stands for the one that it was made of."""
    sample = without_response(next(iter_samples(item)))
    if not isinstance(item, list):
        return sample
    lacks = sample.__dict__.pop("of_prompt", {})
    sample.__dict__.update({**lacks, "metadata": {**lacks.get("metadata", {}), **sample.metadata}})
    sample.rollout_id = None
    if sample.prompt:
        sample.tokens = []
    return sample
