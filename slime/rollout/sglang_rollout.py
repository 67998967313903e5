"""The default rollout: groups of samples from SGLang engines, over-sampled, filtered, scored.

Users replace the functions of this module by patching its names, so every call inside it goes through them.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.cancelling import end_if_cancelled, gather_or_cancel
from slime.rollout.data_source import hand_back
from slime.rollout.eval_rollout import eval_single_dataset
from slime.rollout.group_stream import RolloutStream, run_rollout_hooks, stop_in_flight
from slime.rollout.groups import GroupJob, copy_sample, has_aborted, is_finished, job_of, note_result
from slime.rollout.hooks.hook import Hook, make_hook
from slime.rollout.requests.engines import describe_engines, model_url, num_engines_asked
from slime.rollout.requests.generate_request import Resumes, append_output, generate_payload, routing_headers
from slime.rollout.requests.generate_state import (
    Bookkeeping,
    bookkeeping_of,
    least_used,
    request_limit,
    train_sampling_params,
)
from slime.rollout.requests.images import prepare
from slime.rollout.requests.request_slots import EngineLoads, RequestSlots
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.sample_hooks import apply_sample_hooks
from slime.servers.http_utils import HttpTimeoutError, post
from slime.utils.async_utils import run
from slime.utils.declared import with_defaults
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.moved import also_named
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.sampling import sampling_seed
from slime.utils.types import Sample, iter_samples

if TYPE_CHECKING:
    from slime.arguments.files.eval_config import EvalDatasetConfig
    from slime.rollout.data_source import DataSource

__all__ = [
    "GenerateState",
    "abort",
    "async_rm",
    "batched_async_rm",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "load_function",
    "post",
]

logger = logging.getLogger(__name__)


class GenerateState(Bookkeeping, metaclass=SingletonMeta):
    """State that all requests of this process share: tokenizer, limits, the groups in flight of the current rollout.

    A class that users patch in its place needs ``semaphore``, ``aborted`` and ``dp_rank_context`` for
    ``generate_and_rm``.
    """

    def __init__(self, args: Args) -> None:
        args = with_defaults(args)
        super().__init__(args)
        self.args = args
        trust = {"trust_remote_code": args.trust_remote_code}
        self.tokenizer = load_tokenizer(args.hf_checkpoint, **trust)
        wants_processor = args.multimodal_keys is not None
        loading: dict[str, Any] = {"backend": args.sglang_image_processor_backend, **trust}  # pixels as of engines
        self.processor = load_processor(args.hf_checkpoint, **loading) if wants_processor else None
        engines = EngineLoads(lambda: get_model_url(args, "default", ""), lambda: num_engines_asked(args))
        self.semaphore: asyncio.Semaphore = RequestSlots(lambda: request_limit(args), engines)
        self.sampling_params = train_sampling_params(args)
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * args.sglang_dp_size
        self.dp_rank = 0
        self.on_completed: Callable[[list[Sample]], None] | None = None
        self.unused: list[list[Sample]] = []
        """The groups of a rollout that failed."""
        self.reset()

    def serves(self, args: Args) -> bool:
        """Return True if requests with ``args`` share this state: while some are in flight all do, then those with its
        values.

        A generate function may pass a changed copy of the arguments on; its requests count with the others.
        """
        if args is self.args or self.pendings or len(self.pending_rewards) or self.is_busy:
            return True
        return vars(with_defaults(args)) == vars(self.args)

    @property
    def is_busy(self) -> bool:
        """True when a request holds a slot or waits for one; a semaphore of a plug-in does not report it."""
        slots = self.semaphore
        return not isinstance(slots, RequestSlots) or slots.in_flight > 0 or slots.waiting > 0

    def reset(self) -> None:
        """Forget the rollout in progress."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.pending_rewards.begin()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Hold the engines' data-parallel rank with the fewest requests; ``dp_rank`` is the last that was chosen."""
        with least_used(self.dp_counts) as self.dp_rank:
            yield self.dp_rank

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start one task per group, for rollout functions with their own loop."""
        for group in samples:
            self.pendings.add(GroupJob(group).begin(functools.partial(generate_job, self.args)))
        self.remaining_batch_size += len(samples)


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of ``endpoint`` at the router of ``model_name``; see ``model_url``."""
    return model_url(args, model_name, endpoint)


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default ``--rollout-function-path``: blocks until the rollout (or the evaluation) is complete."""
    args = with_defaults(args)
    assert args.rollout_global_dataset, (
        "the default rollout draws from --prompt-data; with --disable-rollout-global-dataset use your own "
        "--rollout-function-path"
    )
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    state = GenerateState(args)
    state.on_completed = getattr(data_source, "record_completed", None)
    try:
        output, handed_back = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    except BaseException:
        groups, state.unused = state.unused, []
        try:
            hand_back(data_source, groups)
        except Exception:
            logger.exception("the %d groups of rollout %d, which failed, are lost", len(groups), rollout_id)
        raise
    hand_back(data_source, handed_back)
    return output


async def generate_rollout_async(
    args: Args, rollout_id: int, get_samples: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Return ``rollout_batch_size`` groups that pass the dynamic filter, and the groups to hand back to the source.

    Groups are ordered by their first sample's index. In any case nothing stays in flight; on failure the state's
    ``unused`` has the groups that were drawn, to be handed back.
    """
    args = with_defaults(args)
    assert args.rollout_global_dataset, "the default rollout needs the global data set"
    state = GenerateState(args)
    state.rollout_id, state.reward_errors, state.unused = rollout_id, RewardErrors(), []
    if isinstance(state.semaphore, RequestSlots):  # else a plug-in's own
        state.semaphore.count_anew()
    path = args.dynamic_sampling_filter_path
    dynamic_filter = make_hook(path, "dynamic_sampling_filter_path", load=load_function) if path else None
    stream = RolloutStream(args, rollout_id, state, get_samples, generate_job, dynamic_filter)
    try:
        try:
            await stream.fill(args.rollout_batch_size)
            await stream.drain(abort)  # over-sampled groups are still in flight
        finally:
            await stream.suspend()
            state.reset()
            state.reward_errors.late = state.late_failures  # rewards left pending count in a later rollout
        metrics = {**stream.metrics(), **state.reward_errors.metrics()}
        if isinstance(state.semaphore, RequestSlots):
            metrics |= state.semaphore.metrics()
        if len(state.pending_rewards):
            metrics["rollout/reward/left_behind"] = len(state.pending_rewards)
        groups = [job.result for job in stream.taken]
        data = await run_rollout_hooks(args, groups, [*groups, *stream.dropped], get_samples, load_function)
    except BaseException:
        state.unused = stream.unused()
        raise
    return RolloutFnTrainOutput(samples=data, metrics=metrics), stream.handed_back + stream.unfinished


async def generate_job(args: Args, job: GroupJob) -> list[Any]:
    """Generate and score the group of ``job``; return its result."""
    attempt, params = job.ended, GenerateState(args).sampling_params.copy()
    group = await generate_and_rm_group(args, job.group, params, evaluation=False)
    if job.ended is attempt:  # else the group has begun again, and this task continues though it was cancelled
        job.result = group
    return group


async def generate_and_rm_group(
    args: Args, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and score the samples of one prompt concurrently; return them in order.

    With ``group_rm`` the whole group is scored at once, unless the rollout was aborted meanwhile.
    """
    args = with_defaults(args)
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in iter_samples(group):
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    task = asyncio.current_task()
    ended = job_of(task).ended if task is not None else {}
    with trace_span(list(iter_samples(group)), "generate_and_rm_group"):
        tasks = []
        for number, sample in enumerate(group):
            params = sampling_params.copy()
            if args.sglang_enable_deterministic_inference:
                params["sampling_seed"] = _sampling_seed(args, state, sample, number)
            task = asyncio.ensure_future(generate_and_rm(args, sample, params, evaluation=evaluation))
            # A group that is aborted keeps what its other samples have become.
            task.add_done_callback(functools.partial(note_result, ended, number, sample))
            tasks.append(task)
        group = await gather_or_cancel(tasks)
    if args.group_rm and not has_aborted(group):
        await _score(args, state, group, evaluation)
    return group


def _sampling_seed(args: Args, state: object, sample: Sample | list[Any], number: int) -> int:
    """Return the seed of a group's sample: groups are numbered over the whole run, so no draw of a prompt has another
    one's, and a run that is resumed continues. Those without a number have the rollout's, and their own index."""
    first = next(iter_samples(sample))
    if first.group_index is not None:
        return sampling_seed(args.rollout_seed, first.group_index, number)
    return sampling_seed(args.rollout_seed, "rollout", bookkeeping_of(state).rollout_id, first.index, number)


async def generate_and_rm(
    args: Args, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample, run the sample hooks and score it. Finished samples only get the reward they lack.

    Returns the sample, or the list a custom generate function made of it. A sample that was aborted has status
    ABORTED, no reward, and can be passed in again.
    """
    args = with_defaults(args)
    state = GenerateState(args)
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        for one in iter_samples(sample):  # tokens of earlier rollouts stay in the context, and out of the loss
            if one.response_length > 0:
                one.loss_mask = [0] * one.response_length
    result: Sample | list[Sample] = sample
    # A list is what a generate function returned in an earlier rollout: it lacks rewards at most.
    if not isinstance(sample, list) and not is_finished(sample):
        with trace_span(sample, "generate_and_rm"):
            async with state.semaphore:
                if state.aborted:
                    sample.status = Sample.Status.ABORTED
                    return sample
                with state.dp_rank_context():
                    custom = generate_hook(args, sample, load_function)
                    result = await call_generate(custom or generate, args, sample, sampling_params, evaluation)
        if has_aborted(result):
            return result
        notes = bookkeeping_of(state)
        rollout_id = notes.eval_rollout_id if evaluation else notes.rollout_id
        result = await apply_sample_hooks(args, result, rollout_id=rollout_id, evaluation=evaluation)
    if not args.group_rm:
        await _score(args, state, result, evaluation)
    return result


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate the response of ``sample``, or the rest of it when it has some already; return the same sample.

    An abort that was not requested here (engines abort for a weight sync) is resumed from the tokens that were made.
    Raises AssertionError for a sample that is not PENDING or ABORTED or is longer than it may get.
    """
    args = with_defaults(args)
    state = GenerateState(args)
    await prepare(state, sample)
    resumes = Resumes(state, sample)
    while (payload := generate_payload(args, sample, sampling_params, evaluation, state)) is not None:
        limit = {"max_new_tokens": payload["sampling_params"]["max_new_tokens"]}
        with trace_span(sample, "sglang_generate", limit) as span:
            try:
                output = await post(get_model_url(args, "default"), payload, headers=routing_headers(args, sample))
            except HttpTimeoutError as e:
                e.add_note(await describe_engines(get_model_url(args, "default", "")))
                raise
            append_output(args, sample, output, getattr(state, "tokenizer", None))
            span.update(**build_sglang_meta_trace_attrs(output["meta_info"]))
        if not await resumes.needed():
            break
    return sample


async def _score(args: Args, state: object, result: Sample | list[Any], evaluation: bool) -> None:
    """Set the rewards that ``result`` lacks: of one sample, of the list it became, or with ``group_rm`` of a group.

    Rewards of training samples may be left pending when the rollout ends: the next one that gets the samples waits.
    """
    notes, samples = bookkeeping_of(state), list(iter_samples(result))
    if not await notes.pending_rewards.catch_up(samples):
        return
    errors = notes.eval_reward_errors if evaluation else notes.reward_errors
    errors.count_late(args, notes.late_failures, samples)
    unscored = [sample for sample in samples if sample.reward is None]
    if not unscored:
        return
    if args.group_rm:
        unscored = samples  # a group is scored as a whole
    with trace_span(unscored, "group_reward_model" if args.group_rm else "reward_model"):
        if isinstance(result, list):
            reward = errors.score_batch(args, result if args.group_rm else unscored, batched_async_rm)
        else:
            reward = errors.score_one(args, result, async_rm)
        if evaluation:
            await reward
        else:
            await notes.pending_rewards.wait_for(reward, unscored)


async def abort(args: Args, rollout_id: int) -> list[list[Sample]]:
    """Stop everything in flight and return it: to be continued later with ``partial_rollout``, else as it was drawn."""
    args = with_defaults(args)
    names = list(getattr(args, "sglang_model_routers", None) or {}) or ["default"]
    routers = sorted({get_model_url(args, name, "") for name in names})
    return await stop_in_flight(args, rollout_id, GenerateState(args), routers)


async def eval_rollout(args: Args, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Evaluate all data sets of ``args.eval_datasets`` concurrently; the second item is always empty."""
    args = with_defaults(args)
    assert not args.group_rm, "--group-rm is not supported by the built-in evaluation; use --eval-function-path"
    state = GenerateState(args)
    state.eval_rollout_id, state.eval_reward_errors = rollout_id, RewardErrors()
    results = await gather_or_cancel(
        [eval_rollout_single_dataset(args, rollout_id, config) for config in args.eval_datasets]
    )
    data = {name: found for result in results for name, found in result.items()}
    return RolloutFnEvalOutput(data=data, metrics=state.eval_reward_errors.metrics("eval/")), []


async def eval_rollout_single_dataset(
    args: Args, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, list[Any]]]:
    """Return ``{name: {"rewards", "truncated", "samples"}}`` of one data set, in prompt order."""
    args = with_defaults(args)
    return await eval_single_dataset(args, rollout_id, dataset_cfg, GenerateState(args), generate_and_rm)


_NAME = "custom_generate_function_path"


def generate_hook(args: Args, sample: Sample, load: Callable[[str], Any]) -> Hook | None:
    """Return the generate function of ``sample``: its own, else that of the run; None for the built-in one."""
    if sample.generate_function_path:
        return make_hook(sample.generate_function_path, _NAME, "generate_function_path of the sample", load)
    path = args.custom_generate_function_path if sample.generate_function_path is None else None
    return make_hook(path, _NAME, load=load) if path else None


async def call_generate(
    fn: Hook | Callable[..., Any], args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
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


def _replaced(result: object, old: object, new: object) -> Any:
    if isinstance(result, (list, tuple)):
        return [_replaced(item, old, new) for item in result]
    return new if result is old else result


def _as_lists(result: object) -> Any:
    return [_as_lists(item) for item in result] if isinstance(result, (list, tuple)) else result
