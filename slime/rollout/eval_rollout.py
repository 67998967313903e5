"""Evaluation of one data set."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.arguments.files.eval_config import own_path
from slime.arguments.rules.loop import ENVIRONMENT_GENERATE
from slime.observability.progress import progress_bar
from slime.rollout.cancelling import cancel_all
from slime.rollout.groups import copy_prompt, describe_waits
from slime.rollout.requests.generate_request import longest_prompt
from slime.utils.data import Dataset
from slime.utils.sampling import sampling_seed
from slime.utils.types import Sample, iter_samples

if TYPE_CHECKING:
    from slime.arguments.files.eval_config import EvalDatasetConfig
    from slime.rollout.requests.generate_state import RequestState

logger = logging.getLogger(__name__)

SAMPLES_NAMED = 8

EVAL_PROMPT_DATASET: dict[Any, Dataset] = {}
"""Loaded data sets, for the life of the process."""


def _load_dataset(args: Args, config: Any, state: RequestState) -> Dataset:
    load = partial(
        Dataset,
        config.path,
        max_length=args.eval_max_prompt_len,
        engine_max_length=longest_prompt(args),
        prompt_key=config.input_key,
        label_key=config.label_key,
        tool_key=config.tool_key,
        metadata_key=config.metadata_key,
        prompts_are_optional=_generate_path(args, config) == ENVIRONMENT_GENERATE,
        multimodal_keys=_setting(config, "multimodal_keys", args.multimodal_keys),
        apply_chat_template=_setting(config, "apply_chat_template", args.apply_chat_template),
        apply_chat_template_kwargs=_setting(config, "apply_chat_template_kwargs", args.apply_chat_template_kwargs),
    )
    key = (*config.cache_key, args.hf_checkpoint, args.trust_remote_code, repr(load.keywords))
    if key not in EVAL_PROMPT_DATASET:
        EVAL_PROMPT_DATASET[key] = load(tokenizer=state.tokenizer, processor=state.processor)
    return EVAL_PROMPT_DATASET[key]


def _generate_path(args: Args, config: EvalDatasetConfig) -> str | None:
    own = own_path(config, "custom_generate_function_path")
    path: str | None = args.custom_generate_function_path if own is None else own
    return path


def _setting(config: EvalDatasetConfig, name: str, of_run: object) -> Any:
    """Return the setting of a data set, else that of the run, unless the data set switches that off."""
    value = getattr(config, name, None)
    return of_run if value is None and name not in getattr(config, "switched_off", ()) else value


def eval_sampling_params(args: Args, config: EvalDatasetConfig) -> dict[str, Any]:
    """Return the engines' sampling parameters for a data set."""
    params: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "stop": _setting(config, "stop", args.rollout_stop),
        "stop_token_ids": _setting(config, "stop_token_ids", args.rollout_stop_token_ids),
        "skip_special_tokens": _setting(config, "skip_special_tokens", args.rollout_skip_special_tokens),
        "no_stop_trim": _setting(config, "no_stop_trim", True),
        "spaces_between_special_tokens": False,
    }
    for name in ("repetition_penalty", "min_new_tokens"):
        if getattr(config, name, None) is not None:
            params[name] = getattr(config, name)
    return params


def _make_samples(config: Any, dataset: Dataset) -> list[tuple[int, Sample]]:
    """Return ``(copy number, sample)`` of every prompt, numbered in order."""
    samples: list[tuple[int, Sample]] = []
    for prompt_number, prompt in enumerate(dataset.samples):
        for number in range(config.n_samples_per_eval_prompt):
            sample = copy_prompt(prompt)
            sample.index = len(samples)
            sample.group_index = prompt_number
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = own_path(config, "custom_rm_path")
            sample.generate_function_path = own_path(config, "custom_generate_function_path")
            samples.append((number, sample))
    return samples


async def eval_single_dataset(
    args: Args,
    rollout_id: int,
    config: EvalDatasetConfig,
    state: RequestState,
    generate_and_rm: Callable[..., Awaitable[Any]],
) -> dict[str, dict[str, list[Any]]]:
    """Generate and score every sample of a data set through ``generate_and_rm``; ``state`` is the GenerateState.

    Returns ``{name: {"rewards", "truncated", "samples"}}`` in sample order. The first failure cancels the others.
    """
    dataset = _load_dataset(args, config, state)
    params = eval_sampling_params(args, config)
    seeded = args.sglang_enable_deterministic_inference
    pending: dict[asyncio.Task[Any], Sample] = {}
    ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    for number, sample in _make_samples(config, dataset):
        own = params.copy()
        if seeded:  # those of a prompt stay the same over evaluations, so that these compare
            own["sampling_seed"] = sampling_seed(args.rollout_seed, "eval", config.name, sample.group_index, number)
        task = asyncio.ensure_future(generate_and_rm(args, sample, own, evaluation=True))
        pending[task] = sample
        task.add_done_callback(ended.put_nowait)
    stall_s = 2.0 * args.rollout_request_timeout
    reward_key = args.eval_reward_key or args.reward_key
    began, tokens, total_reward, scored = time.monotonic(), 0, 0.0, 0
    total = len(pending)
    results: list[Sample] = []
    try:
        with progress_bar(f"eval {config.name}", total, "sample") as progress:
            while pending:
                try:
                    async with asyncio.timeout(stall_s):
                        task = await ended.get()
                except TimeoutError:
                    left = list(pending.values())
                    raise TimeoutError(
                        f"eval {config.name} of rollout {rollout_id}: no sample finished for {stall_s:g} s "
                        f"(2 x --rollout-request-timeout); {len(left)} of {total} are in flight, the first: "
                        f"{describe_waits(left[:SAMPLES_NAMED])}"
                    ) from None
                sample = pending.pop(task)
                finished = _one_trajectory(sample.index, task.result())
                results += finished
                tokens += sum(sample.response_length for sample in finished)
                rewards = [eval_reward(sample, reward_key) for sample in finished]
                if rewards and all(isinstance(reward, (int, float)) for reward in rewards):
                    total_reward, scored = total_reward + sum(rewards) / len(rewards), scored + 1
                progress.update(
                    1,
                    reward=total_reward / max(1, scored),
                    tok_per_s=round(tokens / max(1e-9, time.monotonic() - began), 1),
                )
    finally:
        await cancel_all(pending)
    results.sort(key=lambda sample: -1 if sample.index is None else sample.index)
    return {
        config.name: {
            "rewards": [eval_reward(sample, reward_key) for sample in results],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in results],
            "samples": results,
        }
    }


def _one_trajectory(index: int | None, result: Sample | list[Any]) -> list[Sample]:
    """Return what became of the sample ``index``, flat: where it is several samples, they share a trajectory."""
    samples = list(iter_samples(result))
    for sample in samples:
        if sample.rollout_id is None and len(samples) > 1:
            sample.rollout_id = index
    return samples


def eval_reward(sample: Sample, reward_key: str | None) -> Any:
    """Return the sample's reward, or its ``reward_key`` entry."""
    if not reward_key:
        return sample.reward
    if not isinstance(sample.reward, dict) or reward_key not in sample.reward:
        raise KeyError(
            f"--eval-reward-key {reward_key!r} expects a dict reward with that key, but eval sample index="
            f"{sample.index} has reward {sample.reward!r}"
        )
    return sample.reward[reward_key]
