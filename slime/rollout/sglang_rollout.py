"""The default rollout: groups of samples from SGLang engines, over-sampled, filtered, scored.

Users replace the functions of this module by patching its names, so every call inside it goes through them.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, iter_samples
from slime.rollout.eval_rollout import eval_single_dataset
from slime.rollout.hooks.custom_generate import call_generate, generate_hook
from slime.rollout.hooks.hook import Hook, make_hook
from slime.rollout.requests.bookkeeping import Bookkeeping, bookkeeping_of
from slime.rollout.requests.cancelling import cancel_all, end_if_cancelled, gather_or_cancel
from slime.rollout.requests.engine_idle import describe_engines
from slime.rollout.requests.generate_request import append_output, generate_payload, prompt_token_ids, routing_headers
from slime.rollout.requests.generate_state import GroupsInFlight, least_used, request_limit, train_sampling_params
from slime.rollout.requests.request_slots import EngineLoads, RequestSlots
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.sample_hooks import apply_sample_hooks
from slime.rollout.stream.group_job import note_prompt
from slime.rollout.train_rollout import Collection, collect, first_index, give_up, stop_in_flight
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpTimeoutError, _wrap_ipv6, get_http_client, get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.moved import also_named
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

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

MAX_RESUMES_WITHOUT_PROGRESS = 20
RESUME_PAUSE_S = 0.2
_FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


class GenerateState(Bookkeeping, metaclass=SingletonMeta):
    """What all requests of this process share: tokenizer, limits, the groups in flight of the present rollout.

    Of what stands in its place ``generate_and_rm`` needs ``semaphore``, ``aborted`` and ``dp_rank_context``.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.args = args
        trust = {"trust_remote_code": args.trust_remote_code}
        self.tokenizer = load_tokenizer(args.hf_checkpoint, **trust)
        wants_processor = args.multimodal_keys is not None
        self.processor = load_processor(args.hf_checkpoint, **trust) if wants_processor else None
        engines = EngineLoads(lambda: get_model_url(args, "default", ""), get_rollout_num_engines(args))
        self.semaphore: asyncio.Semaphore = RequestSlots(request_limit(args), engines)
        self.sampling_params = train_sampling_params(args)
        self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * args.sglang_dp_size
        self.dp_rank = 0
        self.on_completed: Callable[[list[Sample]], None] | None = None
        self.unused: list[list[Sample]] = []
        """The groups of a rollout that failed."""
        self.reset()

    def reset(self) -> None:
        """Forget the rollout in progress."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.groups_in_flight = GroupsInFlight()
        self.pending_rewards.begin()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Hold the engines' data-parallel rank with the fewest requests; ``dp_rank`` is the last that was chosen."""
        with least_used(self.dp_counts) as self.dp_rank:
            yield self.dp_rank

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start one task per group."""
        for group in samples:
            task = asyncio.get_running_loop().create_task(
                generate_and_rm_group(self.args, group, self.sampling_params.copy(), evaluation=False),
                name=f"the group of samples {[sample.index for sample in iter_samples(group)]}",
            )
            self.pendings.add(task)
            self.groups_in_flight.add(task, group)
        self.remaining_batch_size += len(samples)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of ``endpoint`` at the router of ``model_name``, or at the default router for unknown names."""
    routers = getattr(args, "sglang_model_routers", None) or {}  # no flag: set where slime starts the router
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{_wrap_ipv6(host)}:{port}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Generate the response of ``sample``, or the rest of it when it has some already; return the same sample.

    An abort that no one here asked for (engines that abort for a weight sync) is resumed from the tokens it left.
    Raises AssertionError for a sample that is not PENDING or ABORTED or is longer than it may get.
    """
    return await generate_to_the_end(args, sample, sampling_params, evaluation, _generate_once)


async def generate_to_the_end(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    evaluation: bool,
    generate_once: Callable[[Any, Sample, dict[str, Any], bool], Awaitable[None]],
) -> Sample:
    """What ``generate`` does, with a request of another kind: ``generate_once(args, sample, params, evaluation)``."""
    state = GenerateState(args)
    assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), (
        f"sample index={sample.index} cannot be generated from status {sample.status}"
    )
    if not sample.tokens:
        sample.tokens = prompt_token_ids(state, sample)
    stalled = 0
    while True:
        before = sample.response_length
        await generate_once(args, sample, sampling_params, evaluation)
        if sample.status != Sample.Status.ABORTED or state.aborted:
            return sample
        stalled = 0 if sample.response_length > before else stalled + 1
        if stalled > MAX_RESUMES_WITHOUT_PROGRESS:
            raise RuntimeError(
                f"the engines aborted sample index={sample.index} {stalled} times without generating a token, "
                "and no abort was asked for here; see the engine logs"
            )
        await asyncio.sleep(RESUME_PAUSE_S)


async def _generate_once(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> None:
    payload = generate_payload(args, sample, sampling_params, evaluation)
    if payload is None:
        return
    limit = {"max_new_tokens": payload["sampling_params"]["max_new_tokens"]}
    with trace_span(sample, "sglang_generate", limit) as span:
        try:
            output = await post(get_model_url(args, "default"), payload, headers=routing_headers(args, sample))
        except HttpTimeoutError as e:
            e.add_note(await describe_engines(get_model_url(args, "default", "")))
            raise
        span.update(**build_sglang_meta_trace_attrs(output["meta_info"]))
    append_output(args, sample, output)


async def generate_and_rm(
    args: Any, sample: Sample | list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample, run the sample hooks and score it. Finished samples only get the reward they lack.

    Returns the sample, or the list a custom generate function made of it. A sample that was aborted has status
    ABORTED, no reward, and can be passed in again.
    """
    state = GenerateState(args)
    notes = bookkeeping_of(state)
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        for one in iter_samples(sample):
            if one.response_length > 0:
                one.loss_mask = [0] * one.response_length
    if isinstance(sample, list):  # a fan-out that came back through the buffer lacks rewards at most
        if not args.group_rm:
            await _score(args, notes, sample, evaluation)
        return sample
    result: Sample | list[Sample] = sample
    if sample.status not in _FINISHED:
        with trace_span(sample, "generate_and_rm"):
            async with state.semaphore:
                if state.aborted:
                    sample.status = Sample.Status.ABORTED
                    return sample
                with state.dp_rank_context():
                    result = await _generate_resumable(args, sample, sampling_params, evaluation)
        if _any_aborted(result):
            return result
        rollout_id = notes.eval_rollout_id if evaluation else notes.rollout_id
        result = await apply_sample_hooks(args, result, rollout_id=rollout_id, evaluation=evaluation)
    if not args.group_rm:
        await _score(args, notes, result, evaluation)
    return result


async def _generate_resumable(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    """Call the sample's generate function. What a custom one leaves half-done when it is cancelled, or when one of
    several samples it made was aborted, is undone for partial rollouts, unless its attribute ``resumable`` says that it
    can go on from there, as the default one can."""
    custom = generate_hook(args, sample, load_function)
    undo = custom is not None and not getattr(custom.function, "resumable", False)
    original = copy.deepcopy(sample) if undo and args.partial_rollout and not evaluation else None
    try:
        result = await call_generate(custom or generate, args, sample, sampling_params, evaluation)
        end_if_cancelled()
    except asyncio.CancelledError:
        if original is not None:
            _restore(sample, original)
        raise
    if original is not None and isinstance(result, list) and _any_aborted(result):
        _restore(sample, original)
        sample.status = Sample.Status.ABORTED
        return sample
    return result


def _restore(sample: Sample, original: Sample) -> None:
    sample.__dict__.clear()
    sample.__dict__.update(original.__dict__)


def _any_aborted(samples: Any) -> bool:
    return any(sample.status == Sample.Status.ABORTED for sample in iter_samples(samples))


async def _score(args: Any, notes: Bookkeeping, result: Sample | list[Sample], evaluation: bool) -> None:
    if not await notes.pending_rewards.catch_up(iter_samples(result)):
        return
    errors = notes.eval_reward_errors if evaluation else notes.reward_errors
    errors.count_late(args, notes.late_failures, iter_samples(result))
    if isinstance(result, list):
        unscored = [sample for sample in iter_samples(result) if sample.reward is None]
        if unscored:
            with trace_span(unscored, "reward_model"):
                reward = errors.score_batch(args, unscored, batched_async_rm)
                await _wait_for_reward(notes, reward, unscored, evaluation)
    elif result.reward is None:
        with trace_span(result, "reward_model"):
            reward = errors.score_one(args, result, async_rm)
            await _wait_for_reward(notes, reward, [result], evaluation)


async def _wait_for_reward(
    notes: Bookkeeping, reward: Coroutine[Any, Any, None], samples: list[Sample], evaluation: bool
) -> None:
    """Rewards of training samples may be left behind when the rollout ends, until the samples come back."""
    if evaluation:
        await reward
    else:
        await notes.pending_rewards.wait_for(reward, samples)


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and score the samples of one prompt concurrently; return them in order.

    With ``group_rm`` the whole group is scored at once, unless the rollout was aborted meanwhile.
    """
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in iter_samples(group):
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    coros = []
    for number, sample in enumerate(group):
        params = sampling_params.copy()
        if args.sglang_enable_deterministic_inference:
            params["sampling_seed"] = state.group_sampling_seeds[number]
        coros.append(_generate_and_note(args, sample, params, evaluation, number, asyncio.current_task()))
    with trace_span(list(iter_samples(group)), "generate_and_rm_group"):
        group = await gather_or_cancel(coros)
    if args.group_rm and not _any_aborted(group):
        notes, samples = bookkeeping_of(state), list(iter_samples(group))
        caught_up = await notes.pending_rewards.catch_up(samples)
        if caught_up:
            notes.reward_errors.count_late(args, notes.late_failures, samples)
        if caught_up and any(sample.reward is None for sample in samples):
            with trace_span(samples, "group_reward_model"):
                reward = notes.reward_errors.score_batch(args, group, batched_async_rm)
                await _wait_for_reward(notes, reward, samples, evaluation)
    return group


async def _generate_and_note(
    args: Any, sample: Any, params: dict[str, Any], evaluation: bool, number: int, task: asyncio.Task[Any] | None
) -> Sample | list[Sample]:
    """Note what came of a sample for the case that its group is not finished."""
    note = bookkeeping_of(GenerateState(args)).groups_in_flight.note
    try:
        result = await generate_and_rm(args, sample, params, evaluation=evaluation)
    except asyncio.CancelledError:
        if not isinstance(sample, list) and sample.status not in _FINISHED:  # else sample hooks were not done with it
            note(task, number, sample)
        raise
    note_prompt(result, sample)
    note(task, number, result)
    return result


async def abort(args: Any, rollout_id: int) -> list[list[Sample]]:
    """Stop everything in flight and return it: to be continued later with ``partial_rollout``, else as it was drawn."""
    names = list(getattr(args, "sglang_model_routers", None) or {}) or ["default"]
    routers = sorted({get_model_url(args, name, "") for name in names})
    return await stop_in_flight(args, rollout_id, GenerateState(args), routers)


async def generate_rollout_async(
    args: Any, rollout_id: int, get_samples: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Return ``rollout_batch_size`` groups that pass the dynamic filter, and the groups to hand back to the source.

    Groups are ordered by their first sample's index. Whatever happens, nothing stays in flight; on failure the state's
    ``unused`` has the groups that were drawn, to be handed back.
    """
    assert args.rollout_global_dataset, "the default rollout needs the global data set"
    state = GenerateState(args)
    state.rollout_id, state.reward_errors, state.unused = rollout_id, RewardErrors(), []
    if isinstance(state.semaphore, RequestSlots):  # else a plug-in's own
        state.semaphore.count_anew()
    collection = Collection(args, rollout_id, _hook(args, "dynamic_sampling_filter_path"))
    try:
        await _collect_all(args, rollout_id, state, get_samples, collection)
        return await _output(args, state, get_samples, collection)
    except BaseException:
        state.unused = collection.unused()
        raise


async def _collect_all(
    args: Any, rollout_id: int, state: GenerateState, get_samples: Callable[[int], Any], collection: Collection
) -> None:
    try:
        await collect(args, state, get_samples, collection)
        collection.unfinished = await abort(args, rollout_id)
    except BaseException:
        collection.unfinished = await give_up(state)
        raise
    finally:
        await cancel_all(state.pendings)
        await get_http_client().drain_aborts()
        state.reset()
        state.reward_errors.late = state.late_failures
        for group in collection.unfinished:
            collection.fresh.stamp(group)


async def _output(
    args: Any, state: GenerateState, get_samples: Callable[[int], Any], collection: Collection
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    slots, unfinished = state.semaphore, collection.unfinished
    metrics = {**collection.collect_metrics(), **state.reward_errors.metrics()}
    if isinstance(slots, RequestSlots):
        metrics |= slots.metrics()
    if len(state.pending_rewards):
        metrics["rollout/reward/left_behind"] = len(state.pending_rewards)
    if unfinished:
        metrics["rollout/partial_groups" if args.partial_rollout else "rollout/put_back_groups"] = len(unfinished)
    data = sorted(collection.accepted, key=first_index)
    if sample_filter := _hook(args, "rollout_sample_filter_path"):
        await sample_filter.awaited(args, data)
    if process := _hook(args, "rollout_all_samples_process_path"):
        await process.awaited(args, sorted(collection.seen, key=first_index), get_samples)
    return RolloutFnTrainOutput(samples=data, metrics=metrics), collection.handed_back + unfinished


def _hook(args: Any, name: str) -> Hook | None:
    path = getattr(args, name)
    return make_hook(path, name, load=load_function) if path else None


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Evaluate all data sets of ``args.eval_datasets`` concurrently; the second item is always empty."""
    assert not args.group_rm, "--group-rm is not supported by the built-in evaluation; use --eval-function-path"
    state = GenerateState(args)
    state.eval_rollout_id, state.eval_reward_errors = rollout_id, RewardErrors()
    results = await gather_or_cancel(
        [eval_rollout_single_dataset(args, rollout_id, config) for config in args.eval_datasets]
    )
    data = {name: found for result in results for name, found in result.items()}
    return RolloutFnEvalOutput(data=data, metrics=state.eval_reward_errors.metrics("eval/")), []


async def eval_rollout_single_dataset(args: Any, rollout_id: int, dataset_cfg: Any) -> dict[str, dict[str, list[Any]]]:
    """Return ``{name: {"rewards", "truncated", "samples"}}`` of one data set, in prompt order."""
    return await eval_single_dataset(args, rollout_id, dataset_cfg, GenerateState(args), generate_and_rm)


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default ``--rollout-function-path``: blocks until the rollout (or the evaluation) is complete."""
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
            _hand_back(data_source, groups)
        except Exception:
            logger.exception("the %d groups of rollout %d, which failed, are lost", len(groups), rollout_id)
        raise
    _hand_back(data_source, handed_back)
    return output


def _hand_back(data_source: Any, groups: list[list[Sample]]) -> None:
    if not groups:
        return
    if take_back := getattr(data_source, "take_back", None):
        take_back(groups)
    elif getattr(data_source, "accepts_samples", True):
        data_source.add_samples(groups)
    else:
        logger.warning("%d groups are dropped because %s takes none back", len(groups), type(data_source).__name__)
