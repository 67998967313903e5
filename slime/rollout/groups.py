"""Groups: lists of samples, or of lists of samples where one became several. Their state, copies, a new start, and
what is known of a group that is being generated."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from slime.utils.image_tokens import PROMPT_IMAGES
from slime.utils.types import Sample, iter_samples

Group = list[Any]

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
_SHARED = ("multimodal_inputs", "multimodal_train_inputs")
"""Large and never changed in place: copied one level deep."""

_UNCHANGING = frozenset({type(None), bool, int, float, str, Sample.Status})

_OF_A_RESPONSE = ("start_rollout_id", "reward_error")
"""Keys that rollouts set in a sample's metadata."""
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


def first_index(group: Sample | Group) -> int:
    """Return the index of a group's first sample (-1 when it has none)."""
    first = next(iter_samples(group), None)
    return -1 if first is None or first.index is None else first.index


def first_group_index(group: Group) -> int:
    """Return the number that the data source gave to a group; -1 when it gave none."""
    first = next(iter_samples(group), None)
    return -1 if first is None or first.group_index is None else first.group_index


def has_aborted(group: Sample | Group) -> bool:
    """True when a sample was aborted."""
    return any(sample.status == Sample.Status.ABORTED for sample in iter_samples(group))


def is_finished(sample: Sample) -> bool:
    """True when nothing is left to generate: it has its response, or was given up for good."""
    given_up = sample.status == Sample.Status.FAILED and sample.remove_sample and sample.reward is not None
    return sample.status in FINISHED or given_up


def is_complete(group: Group) -> bool:
    """True when every sample has its response, unless it was given up, and its reward."""
    return all(is_finished(s) and s.reward is not None for s in iter_samples(group))


# Copies that later generation does not change, much cheaper than copy.deepcopy


def copy_group(group: Sample | Group) -> Any:
    """Return a copy of a (nested) list of samples; tensors, arrays and images are shared with the original."""
    return [copy_group(item) for item in group] if isinstance(group, list) else copy_sample(group)


def copy_sample(sample: Sample) -> Sample:
    """Return a copy of one sample with its own lists, counters and metadata."""
    new = _shallow(sample)
    for name, value in sample.__dict__.items():
        if type(value) in _UNCHANGING:
            continue
        if isinstance(value, list):
            new.__dict__[name] = value.copy()
        elif name == "trace" and isinstance(value, dict) and isinstance(value.get("events"), list):
            new.__dict__[name] = {**value, "events": value["events"].copy()}  # events do not change once they exist
        elif isinstance(value, dict):
            new.__dict__[name] = value.copy() if name in _SHARED else _copy_dict(value)
        elif isinstance(value, (Sample.SpecInfo, Sample.PrefixCacheInfo)):
            new.__dict__[name] = _shallow(value)
    return new


def copy_prompt(sample: Sample) -> Sample:
    """Return ``copy.deepcopy(sample)``, in a fraction of the time for one whose fields are mostly empty.

    Images are the same objects: they do not change, and what is made of them is made once for a group.
    """
    new = _shallow(sample)
    for name, value in sample.__dict__.items():
        if type(value) in _UNCHANGING:
            continue
        if isinstance(value, (Sample.SpecInfo, Sample.PrefixCacheInfo)):
            new.__dict__[name] = _shallow(value)
        elif type(value) in (list, dict) and not value:
            new.__dict__[name] = type(value)()
        else:
            new.__dict__[name] = copy.deepcopy(value, _shared_images(value) if name in _SHARED else None)
    return new


def _shared_images(inputs: dict[str, Any]) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` with the images of ``inputs``."""
    from PIL import Image

    return {id(image): image for image in inputs.get("images") or () if isinstance(image, Image.Image)}


def _shallow(value: object) -> Any:
    """``copy.copy`` of an object that is all in its dictionary, several times faster."""
    new = object.__new__(type(value))
    new.__dict__.update(value.__dict__)
    return new


def _copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    if not value:
        return {}
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  (a user's object that cannot be copied, a lock or a tensor in a graph, is shared)
        return value.copy()


# A new start: the prompt without its response


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
    if (own := sample.__dict__.pop(PROMPT_IMAGES, None)) is not None:  # what was made of all images is of no use
        inputs = sample.multimodal_inputs or {}
        sample.multimodal_inputs = {**inputs, "images": list(inputs.get("images") or [])[:own]}
        sample.multimodal_train_inputs, sample.tokens = None, []
    return sample


def reset_items(group: Group, is_too_old: Callable[[Any], bool]) -> int:
    """Reset samples (or fan-outs) of a group that are too old to their prompts; return the number of tokens lost."""
    lost = 0
    for number, item in enumerate(group):
        if is_too_old(item):
            lost += sum(sample.response_length for sample in iter_samples(item))
            group[number] = prompt_of(item)
    return lost


def note_prompt(result: Sample | Group, prompt: Sample) -> None:
    """Keep what the first sample of a fan-out, a new object, lacks of ``prompt``: the fan-out may be reset to it."""
    first = next(iter_samples(result), prompt)
    if first is prompt or not isinstance(result, list) or result is prompt:  # a fan-out that was returned, the last
        return
    blank: tuple[Any, ...] = (None, "", {})
    lacks = {name: getattr(prompt, name) for name in _OF_A_PROMPT if getattr(first, name) in blank}
    lacks = {name: value for name, value in lacks.items() if value not in blank}
    known = (*(first.metadata or {}), *_OF_A_RESPONSE)
    if metadata := {name: value for name, value in (prompt.metadata or {}).items() if name not in known}:
        lacks["metadata"] = metadata
    if lacks:
        first.__dict__["of_prompt"] = lacks


def prompt_of(item: Sample | Group) -> Any:
    """Return a sample without its response; of a fan-out the first one replaces the one that it was made of."""
    sample = without_response(next(iter_samples(item)))
    if not isinstance(item, list):
        return sample
    lacks = sample.__dict__.pop("of_prompt", {})
    sample.__dict__.update({**lacks, "metadata": {**lacks.get("metadata", {}), **sample.metadata}})
    sample.rollout_id = None
    if sample.prompt:
        sample.tokens = []
    return sample


# The way of one group to a rollout

_jobs: WeakKeyDictionary[asyncio.Task[Any], GroupJob] = WeakKeyDictionary()


@dataclass(eq=False)
class GroupJob:
    """A group that was drawn from the data source and has not been consumed.

    ``original`` is the group as it was drawn, to start again from; generation works on ``group``, and returns
    ``result``. ``ended`` has what became of single samples, by their number. ``step`` is that of the engines' weights
    at the start, ``oldest`` that of the oldest trained token of ``result``. ``failures`` and ``expired`` count how
    often the group raised and was too old.
    """

    original: Group
    number: int = 0
    group: Group = field(default_factory=list)
    ended: dict[int, Any] = field(default_factory=dict)
    result: Group = field(default_factory=list)
    step: int | None = None
    oldest: int | None = None
    failures: int = 0
    expired: int = 0
    was_finished: bool = False
    """True if nothing was left to generate when it began."""
    was_held: int = 0
    why: str = ""
    """The number of times that it was given up, and the last reason."""
    started: float = 0.0

    def begin(
        self,
        generate: Callable[[GroupJob], Coroutine[Any, Any, Any]],
        step: int | None = None,
        *,
        on_copy: bool = False,
    ) -> asyncio.Task[Any]:
        """Start the task that generates the group: the samples that were drawn themselves, or a copy of them."""
        self.was_finished = all(is_finished(sample) for sample in iter_samples(self.original))
        drawn, copied = self.original, copy_group(self.original)
        self.group, self.original = (copied, drawn) if on_copy else (drawn, copied)
        self.ended, self.result, self.step, self.started = {}, [], step, time.monotonic()
        task = asyncio.get_running_loop().create_task(generate(self), name=self.name())
        _jobs[task] = self
        return task

    def name(self) -> str:
        """Say which group this is."""
        return f"group {first_group_index(self.original)} (samples {[s.index for s in iter_samples(self.original)]})"

    def finished_or_original(self) -> Group:
        """Return the result if it is a whole one, else the group as it was drawn."""
        unfinished = (Sample.Status.PENDING, Sample.Status.ABORTED)
        if len(self.result) != len(self.original) or any(s.status in unfinished for s in iter_samples(self.result)):
            return self.original
        return self.result

    def to_continue(self) -> Group:
        """Return the group as far as it was generated. Samples that failed or did not end, and fan-outs that were
        aborted in part, which cannot resume, are as they were drawn."""
        made = self.result or [self.ended.get(number, item) for number, item in enumerate(self.original)]
        return [
            self.original[number] if isinstance(item, list) and has_aborted(item) else item
            for number, item in enumerate(made)
        ]


def job_of(task: asyncio.Task[Any]) -> GroupJob:
    """Return the job whose group ``task`` generates; a new one for any other task."""
    return _jobs.get(task) or GroupJob([])


def note_result(ended: dict[int, Any], number: int, sample: Any, task: asyncio.Future[Any]) -> None:
    """Write what ``task`` made of one sample of a group into the ``ended`` of its job.

    A cancelled sample keeps what was generated of it, unless it was finished: then sample hooks may have been left
    halfway. One whose generation failed starts again as it was drawn.
    """
    result = sample
    if not task.cancelled():
        if task.exception() is not None:
            return
        result = task.result()
        note_prompt(result, sample)
    elif isinstance(sample, list) or sample.status in FINISHED:
        return
    ended[number] = result


_WAITS_FOR = {
    "sglang_generate": "an engine",
    "reward_model": "its reward",
    "group_reward_model": "the reward of the group",
    "generate_and_rm": "a free slot or its generate function",
    "generate_and_rm_group": "the others of its group",
}
"""Innermost open span of a sample's trace -> what the sample waits for."""


def describe_waits(group: list[Sample]) -> str:
    """Say what each of the samples waits for."""
    waiting: dict[str, list[int | None]] = {}
    for sample in iter_samples(group):
        open_spans: dict[Any, str] = {}
        for event in (getattr(sample, "trace", None) or {}).get("events", ()):
            if event["type"] == "span_start":
                open_spans[event["span_id"]] = event["name"]
            elif event["type"] == "span_end":
                open_spans.pop(event["span_id"], None)
        if open_spans:
            span = list(open_spans.values())[-1]
            waiting.setdefault(_WAITS_FOR.get(span, span), []).append(sample.index)
    return ", ".join(f"samples {indices} wait for {what}" for what, indices in waiting.items()) or "no trace"


def describe_oldest(jobs: Iterable[GroupJob], count: int = 3) -> str:
    """Name the groups that have been in flight longest, and what each of their samples waits for."""
    now = time.monotonic()
    oldest = sorted(jobs, key=lambda job: job.started)[:count]
    return ", ".join(f"{job.name()} for {now - job.started:.0f} s ({describe_waits(job.group)})" for job in oldest)
