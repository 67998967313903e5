"""Built-in rewards (``--rm-type``) and the dispatch to custom ones (``--custom-rm-path``)."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from slime.algorithms.reward_types import BOXED, REWARD_TYPES, RewardType, reward_type
from slime.arguments.args import Args
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.hooks.hook import Hook, find_hook, make_hook
from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.failure import BadReward, RewardFailure
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_verl
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.rm_hub.workers import get_reward_workers
from slime.utils.declared import with_defaults
from slime.utils.misc import load_function
from slime.utils.types import Sample, iter_samples

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
    "reward_kind",
]

logger = logging.getLogger(__name__)

FLAG = "--custom-rm-path"
_MISSING = object()
_BETWEEN = " \n "
"""Replaces the text of others: what the policy wrote before and after it is not one word."""
_loading = threading.Lock()
"""The first samples of a run end together, each in a thread: one loads."""


def reward_kind(args: Args, sample: Sample) -> str:
    """Return ``custom``, or the type of the built-in reward of ``sample``, ``boxed_`` included ("" for none)."""
    if args.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path:
        return "custom"
    return str(_metadata(sample).get("rm_type") or args.rm_type or "").strip()


def _metadata(sample: Sample) -> dict[str, Any]:
    return sample.metadata if isinstance(sample.metadata, dict) else {}


def reward_hook(args: Args, sample: Sample) -> Hook | None:
    """Return the custom reward of ``sample``: its own, else that of the run; None for a built-in one.

    A path of "" means that the sample has none, even if the run has one.
    """
    if sample.custom_rm_path == "":
        return None
    if sample.custom_rm_path:
        flag = f"custom_rm_path of the sample, in place of {FLAG}"
        return make_hook(sample.custom_rm_path, "custom_rm_path", flag, load_function)
    path = args.custom_rm_path
    return make_hook(path, "custom_rm_path", load=load_function) if path else None


def _is_reward(args: Args, reward: object) -> bool:
    """True for what can be a reward; anything goes when a later hook converts it."""
    if reward is not None and not isinstance(reward, (str, bytes, list, tuple, Sample)):
        return True
    hooks = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    return any(getattr(args, name) for name in hooks)


async def async_rm(args: Args, sample: Sample, **kwargs: object) -> Any:
    """Return the reward of one sample.

    The reward is, in this order: ``sample.custom_rm_path``, ``args.custom_rm_path`` (where the sample's is None),
    ``sample.metadata["rm_type"]``, ``args.rm_type``. With a ``boxed_`` prefix a type grades what the last box holds.
    Rules grade what the policy wrote (``own_text``), in worker processes; custom rewards run here. An answer that
    makes its rule take too much time or memory is wrong. Raises NotImplementedError for an unknown type, RewardFailure
    when a rule cannot be computed, and BadReward when a custom one returns no reward.
    """
    args = with_defaults(args)
    if hook := reward_hook(args, sample):
        reward = await hook.awaited_off_loop(args, sample, **kwargs)
        if not _is_reward(args, reward):
            raise BadReward(str(hook.returned(reward, "the reward of one sample, a number or a dict", sample)))
        return reward
    kind = reward_kind(args, sample)
    entry, boxed = reward_type(kind), kind.startswith(BOXED)
    if entry is None:
        raise NotImplementedError(
            f"no reward for sample index={sample.index}: rm_type {kind!r} is unknown. Set --rm-type to one of "
            f"{', '.join(REWARD_TYPES)} (each also as {BOXED}<type>), or {FLAG} to your own function."
        )
    if entry.rule:
        return await _by_rule(args, entry, sample, boxed=boxed)
    if boxed:
        sample = copy.copy(sample)
        sample.response = extract_boxed_answer(sample.response) or ""
    return await load_function(entry.function)(args, sample)


async def _by_rule(args: Args, entry: RewardType, sample: Sample, *, boxed: bool) -> Any:
    response = sample.response
    if has_others_text(sample):  # off the event loop: the first one loads the tokenizer
        response = await asyncio.to_thread(own_text, args, sample)
    if boxed:
        response = rules.as_response(entry.name, extract_boxed_answer(response) or "")
    metadata = _metadata(sample)
    read = {key: metadata[key] for key in entry.metadata if key in metadata}
    try:
        workers = get_reward_workers(args, fresh=entry.fresh)
        return await workers.call(rules.PATH, entry.name, response, sample.label, read)
    except RewardFailure as e:
        if not e.by_answer or entry.wrong is None:
            raise
        logger.warning("the answer of sample index=%s counts as wrong: %s", sample.index, e)
        return copy.copy(entry.wrong)


async def batched_async_rm(args: Args, samples: list[Any], **kwargs: object) -> list[Any]:
    """Return the rewards of several samples, in order; the first failure cancels the others.

    ``args.custom_rm_path`` is called once, with ``samples`` as they are: a group may hold lists of samples. It may
    set the rewards itself and return None. Samples that name their own reward, and all samples without
    ``args.custom_rm_path``, are scored one by one. Rewards of lists of samples are lists too.
    """
    args = with_defaults(args)
    flat = list(iter_samples(samples))
    together = [sample for sample in flat if scored_together(args, sample)]
    if together and len(together) == len(flat):
        assert args.custom_rm_path is not None, "only a function of the user's own scores samples together"
        hook = make_hook(args.custom_rm_path, "custom_rm_path", load=load_function)
        returned = await hook.awaited_off_loop(args, samples, **kwargs)
        rewards = rewards_of(args, samples, returned)
        return nested_like(samples, iter(rewards)) if returned is None else list(returned)
    coros = [async_rm(args, sample, **kwargs) for sample in flat if not scored_together(args, sample)]
    if not together:
        return nested_like(samples, iter(await gather_or_cancel(coros)))
    *alone, joint = await gather_or_cancel([*coros, batched_async_rm(args, together, **kwargs)])
    single, shared = iter(alone), iter(joint)
    return nested_like(samples, (next(shared if scored_together(args, one) else single) for one in flat))


def scored_together(args: Args, sample: Sample) -> bool:
    """True when ``args.custom_rm_path`` scores this sample, in the form that is called with a list."""
    return args.custom_rm_path is not None and sample.custom_rm_path is None


# What a custom reward of several samples may return, for groups that may hold lists of samples


def rewards_of(args: Args, samples: list[Any], returned: object) -> list[Any]:
    """Return a reward per sample, in order, of what ``args.custom_rm_path`` ``returned`` for ``samples``.

    That is a list with one reward per sample; a list with an entry per entry of ``samples``, where that of a list of
    samples is a list of rewards or one reward for all of them; or None, when it has set every ``sample.reward`` itself.
    Raises BadReward for anything else.
    """
    flat = list(iter_samples(samples))
    if returned is None and all(sample.reward is not None for sample in flat):
        return [sample.reward for sample in flat]
    if _is_sequence(returned):
        if len(returned) == len(flat) and not any(map(_is_sequence, returned)):
            return list(returned)
        found = list(_entry_by_entry(samples, returned))
        if len(found) == len(flat) and _MISSING not in found:
            return found
    lacking = [sample.index for sample in flat if sample.reward is None]
    seen = f"None, and left {lacking[:20]} without one" if returned is None else f"{returned!r:.200}"
    raise BadReward(
        f"{find_hook(args, 'custom_rm_path')} was given {len(flat)} samples (indices "
        f"{[sample.index for sample in flat]}) and must return a list of as many rewards, got {seen} (None is right "
        "after it has set the reward of each)"
    )


def nested_like(samples: Iterable[Any], rewards: Iterator[Any]) -> list[Any]:
    """Return ``rewards``, one per sample, in the nesting of ``samples``."""
    return [nested_like(entry, rewards) if isinstance(entry, list) else next(rewards) for entry in samples]


def _entry_by_entry(samples: list[Any], rewards: Collection[Any]) -> Iterator[Any]:
    if len(samples) != len(rewards):
        yield _MISSING
        return
    for entry, reward in zip(samples, rewards, strict=True):
        if isinstance(entry, Sample):
            yield reward
        elif _is_sequence(reward):
            yield from _entry_by_entry(entry, reward)
        else:
            yield from [reward] * len(list(iter_samples(entry)))


def _is_sequence(value: object) -> TypeGuard[Collection[Any]]:
    """True for a list, a tuple or an array with a dimension, but no text and no object."""
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping)) and getattr(value, "ndim", 1) > 0


# The part of a response that the policy wrote: a rule grades that, and not what a tool or an environment answered


@functools.cache
def _load(checkpoint: str, trust_remote_code: bool) -> Any:
    from slime.utils.processing_utils import load_tokenizer

    return load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _tokenizer(checkpoint: str, trust_remote_code: bool) -> Any:
    with _loading:
        return _load(checkpoint, trust_remote_code)


def has_others_text(sample: Sample) -> bool:
    """Return whether the mask of ``sample`` leaves tokens out, so that :func:`own_text` may have to decode."""
    mask, length = sample.loss_mask, sample.response_length
    return mask is not None and len(mask) == length <= len(sample.tokens) and not all(mask)


def own_text(args: Args, sample: Sample) -> str:
    """Return the text of the tokens that have loss mask 1 or that an engine made (``weight_version_spans``).

    That is the response as it stands where these are all its tokens (or none: a sample that is masked whole), and
    where the mask does not fit. The first call loads the tokenizer.
    """
    if not has_others_text(sample):
        return sample.response
    length = sample.response_length
    own = [bool(trained) for trained in sample.loss_mask or ()]
    for span in sample.weight_version_spans:
        own[span["start"] : span["end"]] = [True] * len(own[span["start"] : span["end"]])
    if all(own) or not any(own):
        return sample.response
    tokenizer = _tokenizer(args.hf_checkpoint, args.trust_remote_code)
    runs = itertools.groupby(zip(own, sample.tokens[-length:], strict=True), key=lambda token: token[0])
    texts = [[int(token) for _, token in run] for is_own, run in runs if is_own]
    skip = args.rollout_skip_special_tokens
    return _BETWEEN.join(
        tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=False) for ids in texts
    )
