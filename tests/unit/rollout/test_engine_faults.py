"""Rollouts on engines that refuse, stall, hang and break off: nothing lost, nothing counted twice, all of it named."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from slime.observability.trace_utils import trace_span
from slime.rollout import sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups import GroupJob, describe_oldest
from slime.rollout.requests.generate_state import PendingRewards
from slime.rollout.sglang_rollout import generate_rollout
from slime.servers import http_client
from slime.servers.http_client import HttpRequestError, HttpTimeoutError
from slime.utils.async_utils import get_async_loop
from slime.utils.types import Sample
from tests.support.standin import Failure, FaultMix, hashed_reply

pytestmark = pytest.mark.slow

HERE = __name__
Status = Sample.Status


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(http_client, "BACKOFF_CAP_S", 0.05)


def rest_of_reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
    """Return the rest of the answer to a prompt ``p<number>`` when ``input_ids`` has some of it."""
    size = 1 + next((i for i, token in enumerate(input_ids[1:]) if not chr(token).isdigit()), len(input_ids) - 1)
    return hashed_reply(input_ids[:size], {})[len(input_ids) - size :]


def check_samples(samples: list[Sample], pieces: int = 1) -> None:
    """Every sample once, with exactly the tokens of one answer to its prompt, in at most so many pieces."""
    assert max(Counter(sample.index for sample in samples).values()) == 1
    for sample in samples:
        prompt = [ord(c) for c in sample.prompt]
        assert sample.tokens == prompt + hashed_reply(prompt, {})
        assert len(sample.rollout_log_probs) == len(sample.loss_mask) == sample.response_length
        assert 1 <= len(sample.weight_versions) <= pieces


async def reward_when_all_are_busy(args: Any, sample: Sample, **kwargs: Any) -> float:
    while sum(len(engine.running) for engine in args.engines) < 4:
        await asyncio.sleep(0.001)
    return 1.0


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_the_engines_are_asked_to_stop_when_every_slot_is_taken(cluster, make_args, caplog, partial_rollout):
    """One group ends; the others hold every connection of the client with answers that take forever."""
    args = make_args(
        partial_rollout=partial_rollout, sglang_server_concurrency=2, rollout_num_engines=2, rollout_batch_size=1,
        over_sampling_batch_size=4, custom_rm_path=f"{HERE}.reward_when_all_are_busy",
    )  # fmt: skip
    args.engines = cluster.engines
    for engine in cluster.engines:
        engine.delay = lambda ids: 0.0 if bytes(ids[:2]) == b"p0" else 3600.0
    source = RolloutDataSourceWithBuffer(args)
    assert [group[0].prompt for group in generate_rollout(args, 0, source).samples] == ["p0"]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    if partial_rollout:
        assert any(engine.aborts for engine in cluster.engines)
    left = [sample for group in source.buffer for sample in iter_samples(group)]
    assert {sample.status for sample in left} == {Status.ABORTED if partial_rollout else Status.PENDING}


def test_an_engine_that_is_unavailable_for_a_while_costs_time_only(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.failures.extend([Failure(503, b"busy")] * 10)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    check_samples(list(iter_samples(output.samples)))
    assert len(cluster.requests) == 8 + 2 * 10


def test_a_refusal_ends_the_rollout_at_once_with_the_engines_words(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 300.0
    cluster.engines[0].failures.append(Failure(400, b'{"error":{"message":"longer than the context length 7"}}'))
    began = time.monotonic()
    with pytest.raises(HttpRequestError, match="longer than the context length 7") as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert time.monotonic() - began < 60
    assert caught.value.attempts == 1
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "the other requests aborted")


def test_a_hang_ends_at_its_deadline_and_names_the_engines_and_what_they_hold(cluster, make_args):
    args = make_args(rollout_request_timeout=0.5)
    for engine in cluster.engines:
        engine.failures.extend([Failure(hang=True)] * 50)
    began = time.monotonic()
    with pytest.raises(HttpTimeoutError, match=r"deadline of 0\.5 s") as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert time.monotonic() - began < 60
    notes = " ".join(caught.value.__notes__)
    for engine in cluster.engines:
        assert f"engine {engine.url} holds 0 requests" in notes
    assert "while generating group" in notes


@pytest.mark.parametrize("failure", [Failure(truncated=True), Failure(200, b'{"text": "hal')])
def test_broken_replies_are_reported_and_asked_for_again(cluster, make_args, caplog, failure):
    args = make_args()
    cluster.engines[0].failures.extend([failure] * 3)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    check_samples(list(iter_samples(output.samples)))
    assert any("attempt 1 of 60" in message for message in caplog.messages)
    rids = [request["rid"] for request in cluster.requests]
    assert len(rids) == len(set(rids)) == 8 + 3


def test_a_rollout_without_any_engine_waits_for_one_however_often_it_has_asked(cluster, make_args, monkeypatch):
    """Engines that are started again take longer than the attempts of a request that is refused."""
    monkeypatch.setattr(http_client, "BACKOFF_CAP_S", 0.01)
    args = make_args()
    lost, cluster.router.engines[:] = list(cluster.router.engines), []
    asked = 0
    real = cluster.router.handle

    async def handle(request: Any) -> Any:
        nonlocal asked
        asked += request.path == "/generate"
        if asked == 8 * 70:  # 8 samples, 60 attempts
            cluster.router.engines[:] = lost
        return await real(request)

    monkeypatch.setattr(cluster.listeners[cluster.router.url], "handler", handle)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    check_samples(list(iter_samples(output.samples)))
    assert asked >= 8 * 70
    assert len(cluster.requests) == 8


def test_a_rollout_that_gets_no_engine_back_ends_at_its_deadline(cluster, make_args):
    args = make_args(rollout_request_timeout=1.0)
    cluster.router.engines.clear()
    with pytest.raises(HttpTimeoutError, match=r"deadline of 1 s; the last failed attempt: answered 503") as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert "has no engine" in " ".join(caught.value.__notes__)
    assert caught.value.body == '{"error":{"code":"no_available_workers"}}'


def rollouts_under_faults(cluster: Any, args: Any, rollouts: int) -> None:
    for number, engine in enumerate(cluster.engines):
        engine.record = False
        engine.duration = lambda ids: 0.001
        engine.reply = rest_of_reply
        rates = [
            (0.05, Failure(503, b"busy")),
            (0.03, Failure(cut=True)),
            (0.03, Failure(truncated=True)),
            (0.02, Failure(200, b'{"text"')),
        ]
        engine.faults = FaultMix(rates, seed=number)
    source = RolloutDataSourceWithBuffer(args)
    seen: set[int] = set()
    process = psutil.Process()
    early: tuple[int, int, int] | None = None
    for rollout_id in range(rollouts):
        samples = list(iter_samples(generate_rollout(args, rollout_id, source).samples))
        check_samples(samples, pieces=3 if args.partial_rollout else 1)
        indices = {sample.index for sample in samples}
        assert len(indices) == args.rollout_batch_size * args.n_samples_per_prompt
        assert not seen & indices, "a sample was trained twice"
        seen |= indices
        if rollout_id == rollouts // 4:
            gc.collect()
            early = (process.memory_info().rss, threading.active_count(), len(os.listdir("/proc/self/fd")))
    assert source.sample_index - len(seen) == sum(len(group) for group in source.buffer), "samples were lost"
    gc.collect()
    assert early is not None
    assert process.memory_info().rss - early[0] < 64 << 20
    assert threading.active_count() <= early[1] + 2
    assert len(os.listdir("/proc/self/fd")) <= early[2] + args.sglang_server_concurrency


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_lost_or_counted_twice_under_random_faults(cluster, make_args, partial):
    rollouts_under_faults(cluster, make_args(prompts=400, over_sampling_batch_size=6, partial_rollout=partial), 8)


@pytest.mark.soak
def test_a_hundred_thousand_groups_under_random_faults(cluster, make_args):
    args = make_args(prompts=5000, rollout_batch_size=250, over_sampling_batch_size=260, n_samples_per_prompt=1)
    rollouts_under_faults(cluster, args, 400)


REWARDS: dict[str, Any] = {}


def reset_rewards(expected: int) -> None:
    REWARDS.update(asked=[], cancelled=0, expected=expected, all_asked=asyncio.Event(), answer=asyncio.Event())


async def slow_judge(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Answers p0 and p1 when ``REWARDS["answer"]`` is set, the others once it was asked for all of p0 and p1."""
    several = sample if isinstance(sample, list) else [sample]
    REWARDS["asked"] += [one.prompt for one in several]
    slow = several[0].prompt in ("p0", "p1")
    if sum(prompt in ("p0", "p1") for prompt in REWARDS["asked"]) >= REWARDS["expected"]:
        REWARDS["all_asked"].set()
    try:
        await (REWARDS["answer"] if slow else REWARDS["all_asked"]).wait()
    except asyncio.CancelledError:
        REWARDS["cancelled"] += slow
        raise
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    turns = []
    for turn in range(2):
        copy = Sample.from_dict(sample.to_dict())
        copy.rollout_id, copy.tokens = sample.index, [1]
        copy.append_response_tokens(tokens=[turn], log_probs=[-0.1], text=f"turn {turn}")
        copy.status = Status.COMPLETED
        turns.append(copy)
    return turns


@pytest.mark.parametrize(
    "overrides",
    [{}, {"group_rm": True}, {"custom_generate_function_path": f"{HERE}.two_turns"}],
    ids=["samples", "groups", "fan-out"],
)
@pytest.mark.parametrize("answered", ["before the next rollout", "during it"])
def test_slow_rewards_are_left_behind_and_asked_for_once(cluster, make_args, overrides, answered):
    args = make_args(over_sampling_batch_size=6, partial_rollout=True, custom_rm_path=f"{HERE}.slow_judge", **overrides)
    reset_rewards(2 * args.n_samples_per_prompt * (2 if args.custom_generate_function_path else 1))
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert {sample.prompt for sample in iter_samples(output.samples)} == {"p2", "p3", "p4", "p5"}
    left = list(iter_samples(source.buffer))
    assert {(s.prompt, s.status, s.reward) for s in left} == {(p, Status.COMPLETED, None) for p in ("p0", "p1")}
    assert output.metrics["rollout/reward/left_behind"] == len(left)
    responses, requests = [s.response for s in left], len(cluster.requests)
    get_async_loop().call_soon_threadsafe(REWARDS["answer"].set)
    if answered == "before the next rollout":
        cluster.wait_until(lambda: {s.reward for s in left} == {1.0}, "the rewards of p0 and p1")
    output = generate_rollout(args, 1, source)
    again = [s for s in iter_samples(output.samples) if s.prompt in ("p0", "p1")]
    assert [s.response for s in again] == responses
    assert {s.reward for s in again} == {1.0}
    new = [chr(r["input_ids"][1]) for r in cluster.requests[requests:]]
    assert not {"0", "1"} & set(new), "finished responses were generated again"
    assert [REWARDS["asked"].count(p) for p in ("p0", "p1")] == [len(left) // 2] * 2
    assert REWARDS["cancelled"] == 0


def test_a_reward_may_take_several_rollouts(cluster, make_args):
    args = make_args(prompts=60, over_sampling_batch_size=6, partial_rollout=True, custom_rm_path=f"{HERE}.slow_judge")
    reset_rewards(2 * args.n_samples_per_prompt)
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(3):
        output = generate_rollout(args, rollout_id, source)
        assert not {"p0", "p1"} & {sample.prompt for sample in iter_samples(output.samples)}
    get_async_loop().call_soon_threadsafe(REWARDS["answer"].set)
    output = generate_rollout(args, 3, source)
    assert {"p0", "p1"} < {sample.prompt for sample in iter_samples(output.samples)}
    asked = [REWARDS["asked"].count(p) for p in ("p0", "p1")]
    assert asked == [args.n_samples_per_prompt] * 2


def test_without_partial_rollout_pending_rewards_are_cancelled(cluster, make_args):
    args = make_args(over_sampling_batch_size=6, custom_rm_path=f"{HERE}.slow_judge")
    reset_rewards(2 * args.n_samples_per_prompt)
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert {sample.prompt for sample in iter_samples(output.samples)} == {"p2", "p3", "p4", "p5"}
    assert REWARDS["cancelled"] == 2 * args.n_samples_per_prompt
    assert {(s.prompt, s.status) for s in iter_samples(source.buffer)} == {(p, Status.PENDING) for p in ("p0", "p1")}
    assert "rollout/reward/left_behind" not in output.metrics


async def test_who_waits_for_what_is_reported():
    group = [Sample(prompt="p", index=i, group_index=7) for i in range(3)]
    job = GroupJob(group)
    task = job.begin(lambda job: asyncio.sleep(0))
    with trace_span(group[0], "generate_and_rm"), trace_span(group[0], "sglang_generate"):
        with trace_span(group[1], "reward_model"), trace_span(group[2], "reward_model"):
            reported = describe_oldest([job])
    assert reported == (
        "group 7 (samples [0, 1, 2]) for 0 s (samples [0] wait for an engine, samples [1, 2] wait for its reward)"
    )
    await task


async def test_only_leaving_lets_a_caller_continue_without_its_reward():
    pending, sample, answer = PendingRewards(), Sample(), asyncio.Event()

    async def fails() -> None:
        raise KeyError("judge")

    async def scores() -> None:
        await answer.wait()
        sample.reward = 1.0

    with pytest.raises(KeyError, match="judge"):
        await pending.wait_for(fails(), [Sample()])
    cancelled = asyncio.create_task(pending.wait_for(asyncio.sleep(30), [Sample()]))
    waiting = asyncio.create_task(pending.wait_for(scores(), [sample]))
    await asyncio.sleep(0)
    assert len(pending) == 2
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert len(pending) == 1
    pending.leave()
    await waiting
    await pending.wait_for(fails(), [Sample()])  # nor is a reward waited for that is only asked for now
    assert sample.reward is None
    assert not await pending.catch_up([sample])
    for leave_again in (True, False):
        pending.begin()
        back = asyncio.create_task(pending.catch_up([sample, Sample()]))
        await asyncio.sleep(0)
        assert not back.done()
        if leave_again:
            pending.leave()
            assert not await back
    answer.set()
    assert await back
    assert (sample.reward, len(pending)) == (1.0, 0)
    with pytest.raises(KeyError, match="judge"):
        await pending.wait_for(fails(), [Sample()])


def test_the_start_of_a_large_rollout_does_not_hold_up_its_first_replies(cluster, make_args):
    """400 groups are begun one by one: between two of them the event loop gets to everything else."""
    args = make_args(prompts=400, rollout_batch_size=400, over_sampling_batch_size=400, n_samples_per_prompt=1,
                     sglang_server_concurrency=4)  # fmt: skip
    begun_in_a_turn = Counter[int]()
    real, turn, begun = sglang_rollout.generate_and_rm_group, 0, 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if begun < 400:
            asyncio.get_running_loop().call_soon(next_turn)

    async def watched(*positional: Any, **named: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 1:
            next_turn()
        begun_in_a_turn[turn] += 1
        return await real(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_rollout, "generate_and_rm_group", watched)
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert begun == 400
    assert max(begun_in_a_turn.values()) <= 2
