"""The fully asynchronous rollout against stand-in engines: order, hooks, failures, staleness, evaluation, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream, outages, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async
from slime.rollout.group_stream import CompletedGroups
from slime.rollout.groups import GroupJob
from slime.rollout.rm_hub.failure import TooManyRewardFailures
from slime.rollout.staleness import WeightClock
from slime.utils.async_utils import get_async_loop, interrupt, run
from slime.utils.types import Sample

HERE = __name__
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock of the test's own; whatever a test leaves in flight ends with it."""
    fresh = WeightClock()
    monkeypatch.setattr(group_stream, "weight_clock", lambda: fresh)
    SEEN.clear()
    yield fresh
    fully_async_rollout.stop_global_worker()


@pytest.fixture
def start(make_args):
    """Return arguments and a data source."""

    def begin(**changes: Any) -> tuple[SimpleNamespace, RolloutDataSourceWithBuffer]:
        args = make_args(**{"prompts": 100, "sglang_server_concurrency": 8, **changes})
        args.prompts = changes.get("prompts", 100)
        return args, RolloutDataSourceWithBuffer(args)

    return begin


def prompts(groups: Any) -> list[str]:
    return [group[0].prompt for group in groups]


def settle(worker: AsyncRolloutWorker, condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{worker.queue_size()} ready, {len(worker.in_flight)} running"
        time.sleep(0.005)


def test_rollouts_follow_each_other_without_loss_or_repetition(cluster, start):
    args, source = start()
    groups = [group for i in range(5) for group in generate_rollout_fully_async(args, i, source).samples]
    assert len(groups) == 20
    assert all(len(group) == 2 for group in groups)
    worker = fully_async_rollout.get_global_worker(args, source)
    left = run(worker.close())
    assert sorted(g[0].group_index for g in [*groups, *left]) == list(range(source.sample_group_index))
    for rollout in range(5):
        first = [group[0].index for group in groups[4 * rollout : 4 * rollout + 4]]
        assert first == sorted(first)


def test_generation_continues_between_rollouts_and_stops_at_the_limit(cluster, start):
    args, source = start()
    generate_rollout_fully_async(args, 0, source)
    worker = fully_async_rollout.get_global_worker(args, source)
    settle(worker, lambda: worker.queue_size() >= worker.concurrency and not worker.in_flight)
    assert worker.concurrency == 16
    drawn = source.sample_group_index
    time.sleep(0.05)
    assert source.sample_group_index == drawn
    sent = len(cluster.requests)
    output = generate_rollout_fully_async(args, 1, source)  # ready at once
    assert output.metrics["rollout/fully_async/ready_groups"] >= 12
    assert len(output.samples) == 4
    assert len(cluster.requests) <= sent + 2 * 16


def test_slots_are_full_and_few_samples_wait_for_one(cluster, start):
    args, source = start(sglang_server_concurrency=3, n_samples_per_prompt=2)
    for engine in cluster.engines:
        engine.delay = 0.01
    worker = fully_async_rollout.get_global_worker(args, source)
    waiting = []
    generate_rollout_fully_async(args, 0, source)
    for _ in range(50):
        waiting.append(worker._slots.waiting)
        time.sleep(0.002)
    assert max(waiting) <= 3
    assert sum(engine.max_running for engine in cluster.engines) >= 6  # 3 on each of two engines


def test_completed_groups_are_taken_oldest_first_and_the_rest_stays():
    queue = CompletedGroups()
    for number, oldest in enumerate([3, None, 2, 3, 2]):
        queue.put(GroupJob([], number, oldest=oldest))
    assert [job.number for job in queue.take(2)] == [1, 2]
    assert [job.number for job in queue.take(0)] == []
    assert [job.number for job in queue.take(where=lambda job: job.number == 3)] == [3]
    assert [job.number for job in queue.peek()] == [0, 4]
    assert [job.number for job in queue.take()] == [4, 0]
    assert len(queue) == 0


def test_the_worker_can_be_used_alone(cluster, start):
    args, source = start()
    worker = AsyncRolloutWorker(args, source, 3)
    worker.start()
    settle(worker, lambda: worker.queue_size() >= 3 and not worker.in_flight)
    assert worker.queue_size() <= 5  # those in flight when the queue was full
    (first,) = worker.get_completed_groups(limit=1)
    assert first[1][0].prompt == f"p{first[0]}"
    rest = worker.get_completed_groups()
    worker.stop()
    taken = [number for number, _ in [first, *rest]]
    returned = [group[0].group_index for group in source.get_samples(source.get_buffer_length())]
    assert sorted(taken + returned) == list(range(source.sample_group_index))


def keep_even(args: Any, group: list[Sample], **_: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd")


def mark_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def remember_all(args: Any, groups: list[list[Sample]], get_samples: Any) -> None:
    assert callable(get_samples)
    SEEN.append([group[0].group_index for group in groups])


def hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata = {**sample.metadata, "hook": (rollout_id, evaluation)}


async def length_reward(args: Any, sample: Sample, **_: Any) -> float:
    return float(sample.response_length)


def test_the_hooks_are_those_of_the_default_rollout(cluster, start):
    args, source = start(
        dynamic_sampling_filter_path=f"{HERE}.keep_even",
        rollout_sample_filter_path=f"{HERE}.mark_first",
        rollout_all_samples_process_path=f"{HERE}.remember_all",
        rollout_sample_hook_path=[f"{HERE}.hook"],
        custom_rm_path=f"{HERE}.length_reward",
    )
    outputs = [generate_rollout_fully_async(args, i, source) for i in range(3)]
    for output in outputs:
        assert all(group[0].group_index % 2 == 0 for group in output.samples)
        assert [s.remove_sample for s in iter_samples(output.samples)] == [True] + [False] * 7
        for sample in iter_samples(output.samples):
            assert sample.metadata["hook"][1] is False
            assert sample.reward == sample.response_length
    dropped = sum(output.metrics.get("rollout/dynamic_filter/drop_odd", 0) for output in outputs)
    consumed = [group[0].group_index for output in outputs for group in output.samples]
    assert sorted(index for seen in SEEN for index in seen if index % 2 == 0) == sorted(consumed)
    assert len([index for seen in SEEN for index in seen if index % 2]) == dropped > 0


def test_groups_that_are_returned_complete_are_not_generated_again(cluster, start, clock):
    args, source = start(dynamic_sampling_filter_path=f"{HERE}.keep_even")
    worker = AsyncRolloutWorker(args, source)
    worker.start()
    settle(worker, lambda: worker.queue_size() >= 8)
    worker.stop()
    complete = [group for group in source.buffer if group[0].reward is not None]
    assert len(complete) >= 8
    odd = complete[0][0].group_index + 1
    again = Sample(group_index=odd, index=7, prompt="p", status=Sample.Status.COMPLETED, reward=1.0)
    source.buffer[:] = [[again, again], *complete]
    sent = len(cluster.requests)
    kept = [group[0].group_index for i in range(2) for group in generate_rollout_fully_async(args, i, source).samples]
    assert kept == [group[0].group_index for group in complete[:8]]
    assert len([r for r in cluster.requests[sent:] if r["input_ids"] == [ord(c) for c in complete[0][0].prompt]]) == 0


def test_complete_groups_that_are_too_old_are_generated_again(cluster, start, clock):
    args, source = start(max_staleness=1)
    clock.publish(1, 5)
    set_version(cluster, "1")
    group = source.get_samples(1)[0]
    for sample in group:
        span = {"version": "9", "start": 0, "end": 2, "step": 3}  # of an earlier start
        sample.tokens, sample.response_length, sample.response = [1, 2, 3], 2, "ab"
        sample.weight_version_spans, sample.status, sample.reward = [span], Sample.Status.COMPLETED, 1.0
    source.add_samples([group])
    output = generate_rollout_fully_async(args, 5, source)
    versions = {span["version"] for sample in iter_samples(output.samples) for span in sample.weight_version_spans}
    assert versions == {"1"}


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    halves = []
    for _ in range(2):
        half = Sample.from_dict(sample.to_dict())
        half.rollout_id = sample.index
        half.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
        halves.append(half)
    return halves


def test_a_generate_function_may_fan_out(cluster, start):
    args, source = start(custom_generate_function_path=f"{HERE}.fan_out")
    output = generate_rollout_fully_async(args, 0, source)
    assert len(list(iter_samples(output.samples))) == 4 * 2 * 2
    left = fully_async_rollout.get_global_worker(args, source).unconsumed()
    assert left
    assert all(sample.response_length == 0 for group in left for sample in iter_samples(group))


TROUBLE: Counter[int] = Counter()


async def fails_twice(args: Any, sample: Sample) -> None:
    TROUBLE[sample.index] += 1
    if sample.index == 2 and TROUBLE[2] <= 2:
        await asyncio.sleep(0.01)
        raise ValueError("the hook broke")


def always_fails(args: Any, sample: Sample) -> None:
    if sample.group_index == 1:
        raise ValueError("the hook broke")


def test_a_group_that_raises_begins_again(cluster, start, caplog):
    TROUBLE.clear()
    set_version(cluster, "1")
    args, source = start(rollout_sample_hook_path=[f"{HERE}.fails_twice"], max_staleness=0)
    fully_async_rollout.get_global_worker(args, source).clock.publish(1, 0)
    output = generate_rollout_fully_async(args, 0, source)
    assert prompts(output.samples) == ["p0", "p1", "p2", "p3"]
    assert output.metrics["rollout/fully_async/failed_attempts"] == 2
    assert (
        "group 1 (samples [2, 3]) failed (attempt 1 of 3) and begins again: ValueError: the hook broke" in caplog.text
    )
    messages = [record.message for record in caplog.records if "begins again" in record.message]
    assert [message.count(f"{HERE}.fails_twice") for message in messages] == [1, 1]


def test_one_that_always_raises_stops_the_run_and_names_sample_and_hook(cluster, start):
    args, source = start(rollout_sample_hook_path=[f"{HERE}.always_fails"])

    def rollouts() -> None:
        for rollout_id in range(200):  # as many as fit in the time of three attempts
            generate_rollout_fully_async(args, rollout_id, source)

    with pytest.raises(ValueError, match="the hook broke") as caught:
        rollouts()
    notes = "\n".join(caught.value.__notes__)
    assert "while generating group 1 (samples [2, 3])" in notes
    assert notes.count(f"--rollout-sample-hook-path '{HERE}.always_fails' ({__file__}:") == 1
    assert "attempt 3 of 3" in notes
    worker = fully_async_rollout.get_global_worker(args, source)
    assert not worker.in_flight
    assert 1 in [group[0].group_index for group in worker.unconsumed()]


async def no_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    raise ValueError("the judge is away")


def test_too_many_failed_rewards_stop_the_run_at_once(cluster, start):
    """Each failure is a sample's; that there are too many is no failure of a group that beginning again would fix."""
    args, source = start(custom_rm_path=f"{HERE}.no_reward")
    with pytest.raises(TooManyRewardFailures, match="the judge is away"):
        generate_rollout_fully_async(args, 0, source)
    worker = fully_async_rollout.get_global_worker(args, source)
    assert worker.counts["fully_async/failed_attempts"] == 0


async def aborts_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 2 and not TROUBLE[sample.index]:
        TROUBLE[sample.index] += 1
        sample.status = Sample.Status.ABORTED
        return sample
    return await sglang_rollout.generate(args, sample, sampling_params)


async def aborts_always(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.status = Sample.Status.ABORTED
    return sample


def test_aborted_groups_begin_again_but_not_forever(cluster, start, clock, monkeypatch):
    TROUBLE.clear()
    clock.publish(1, 0)
    set_version(cluster, "1")
    args, source = start(custom_generate_function_path=f"{HERE}.aborts_once", max_staleness=0)
    output = generate_rollout_fully_async(args, 0, source)
    assert prompts(output.samples) == ["p0", "p1", "p2", "p3"]
    assert output.metrics["rollout/fully_async/aborted_groups"] == 1
    assert [sample.metadata for sample in output.samples[2]] == [{"failed_attempts": 1}] * 2
    args.custom_generate_function_path = f"{HERE}.aborts_always"
    args.service_outage_timeout = 0.3
    monkeypatch.setattr(outages, "FIRST_PAUSE_S", 0.05)
    clock.publish(2, 1)
    named = "generate function .*aborts_always has failed for all for .* s .--service-outage-timeout 0.3"
    with pytest.raises(outages.ServiceOutage, match=named):
        generate_rollout_fully_async(args, 1, source)


def remember_and_pop(args: Any, rollout_id: None, buffer: list[Any], count: int) -> list[Any]:
    SEEN.append((rollout_id, [[sample.response for sample in group] for group in buffer], count))
    return [buffer.pop(0)]


async def half_a_response(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 2 and sample.index == 4 and not sample.response_length:
        meta = {"finish_reason": {"type": "abort"}, "weight_version": "1"}
        sample.tokens = [ord(c) for c in sample.prompt]
        sample.append_response_tokens(tokens=[7, 7], log_probs=[-1.0, -1.0], text="77", meta_info=meta)
        return sample
    return await sglang_rollout.generate(args, sample, sampling_params)


half_a_response.resumable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("partial", [False, True])
def test_aborted_groups_go_through_the_buffer_and_its_filter(cluster, start, clock, partial):
    clock.publish(1, 0)
    set_version(cluster, "1")
    for engine in cluster.engines:  # the group that is aborted is handed back before another one makes room for p4
        engine.delay = lambda ids: 0.0 if bytes(ids[:2]) == b"p2" else 0.5
    args, source = start(
        custom_generate_function_path=f"{HERE}.half_a_response", buffer_filter_path=f"{HERE}.remember_and_pop",
        partial_rollout=partial, max_staleness=0,
    )  # fmt: skip
    if not partial:
        TROUBLE.clear()
        args.custom_generate_function_path = f"{HERE}.aborts_once"
    output = generate_rollout_fully_async(args, 0, source)
    assert prompts(output.samples) == ["p0", "p1", "p2", "p3"]
    ((rollout_id, [responses], count),) = SEEN
    assert (rollout_id, count) == (None, 1)
    assert responses[0] == ("77" if partial else "")
    again = output.samples[2][0]
    assert again.tokens[2:4] == [7, 7] if partial else again.tokens[2:4] != [7, 7]
    assert sum(span["end"] - span["start"] for span in again.weight_version_spans) == again.response_length


def test_a_source_that_fails_to_take_a_group_back_stops_the_run_and_the_group_is_kept(cluster, start):
    TROUBLE.clear()
    args, source = start(custom_generate_function_path=f"{HERE}.aborts_once")

    def broken(groups: Any) -> None:
        raise OSError("the buffer is full")

    source.add_samples = broken
    with pytest.raises(OSError, match="the buffer is full"):
        generate_rollout_fully_async(args, 0, source)
    left = fully_async_rollout.get_global_worker(args, source).unconsumed()
    assert sorted(group[0].group_index for group in left) == list(range(source.sample_group_index))
    del source.add_samples


def test_engines_without_the_pushed_weights_are_found_out(cluster, start, clock):
    """They report a version that was never pushed: nothing of them is trained on, and the run ends."""
    clock.publish(1, 0)
    set_version(cluster, "default")
    args, source = start(max_staleness=3)
    with pytest.raises(RuntimeError, match=r"was too old for --max-staleness 3 10 times.*of steps -1 \(-1: "):
        generate_rollout_fully_async(args, 0, source)


def test_a_fan_out_that_is_returned_too_old_begins_again_from_its_prompt(cluster, start, clock):
    args, source = start(custom_generate_function_path=f"{HERE}.fan_out", max_staleness=1)
    clock.publish(7, 5)
    group = source.get_samples(1)[0]
    old = [run(fan_out(args, sample, {})) for sample in group]
    for sample in iter_samples(old):
        sample.reward = 0.0
        sample.weight_version_spans = [{"version": "7", "start": 0, "end": 1, "step": 3}]  # of an earlier start
    source.add_samples([old])
    output = generate_rollout_fully_async(args, 5, source)
    first = output.samples[0]
    assert [[sample.index for sample in item] for item in first] == [[0, 0], [1, 1]]
    spans = [sample.weight_version_spans for sample in iter_samples(first)]
    assert spans == [[{"version": None, "start": 0, "end": 1, "step": 5}]] * 4
    assert output.metrics["rollout/staleness/regenerated_tokens"] == 4
    assert output.metrics["rollout/staleness/regenerated_groups"] == 1


def set_version(cluster: Any, version: str) -> None:
    for engine in cluster.engines:
        engine.weight_version = version


def test_nothing_begins_that_could_get_too_old(cluster, start, clock):
    args, source = start(max_staleness=1)
    clock.publish(1, 0)
    set_version(cluster, "1")
    generate_rollout_fully_async(args, 0, source)
    worker = fully_async_rollout.get_global_worker(args, source)
    settle(worker, lambda: worker.queue_size() == 4 and not worker.in_flight)
    time.sleep(0.05)
    assert source.sample_group_index == 8  # rollout 0, and one more at weights of step 0
    generate_rollout_fully_async(args, 1, source)
    time.sleep(0.05)
    assert source.sample_group_index == 8  # for rollout 2 the weights of step 0 are too old
    clock.publish(2, 1)
    set_version(cluster, "2")
    settle(worker, lambda: worker.queue_size() == 4)
    assert source.sample_group_index == 12
    assert "rollout/staleness/regenerated_groups" not in generate_rollout_fully_async(args, 2, source).metrics


def test_a_rollout_waits_for_the_weights_it_needs(cluster, start, clock):
    args, source = start(max_staleness=0)
    clock.publish(1, 0)
    set_version(cluster, "1")
    generate_rollout_fully_async(args, 0, source)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(generate_rollout_fully_async(args, 1, source)))
    thread.start()
    thread.join(0.2)
    assert not done
    assert source.sample_group_index == 4
    set_version(cluster, "2")
    clock.publish(2, 1)
    thread.join(10)
    assert {s.weight_versions[0] for s in iter_samples(done[0].samples)} == {"2"}


def test_what_got_too_old_is_generated_again(cluster, start, clock):
    args, source = start(max_staleness=1)
    clock.publish(1, 0)
    set_version(cluster, "1")
    first = generate_rollout_fully_async(args, 0, source)
    worker = fully_async_rollout.get_global_worker(args, source)
    settle(worker, lambda: worker.queue_size() == 4)
    set_version(cluster, "3")
    clock.publish(3, 2)  # two steps at once: those four are too old for rollout 2
    output = generate_rollout_fully_async(args, 2, source)
    drawn = [group[0].group_index for group in [*first.samples, *output.samples, *worker.unconsumed()]]
    assert sorted(drawn) == list(range(source.sample_group_index))
    assert {version for s in iter_samples(output.samples) for version in s.weight_versions} == {"3"}
    assert output.metrics["rollout/staleness/regenerated_groups"] == 4
    assert output.metrics["rollout/staleness/regenerated_tokens"] > 0


def test_stopping_hands_everything_back_and_leaves_nothing_running(cluster, start):
    args, source = start(sglang_server_concurrency=2)
    generate_rollout_fully_async(args, 0, source)
    for engine in cluster.engines:
        engine.delay = 60.0
    worker = fully_async_rollout.get_global_worker(args, source)
    worker.get_completed_groups()
    consumed = source.sample_group_index
    settle(worker, lambda: len(worker.in_flight) >= 2)
    threads = threading.active_count()
    began = time.monotonic()
    generate_rollout_fully_async.stop()
    assert time.monotonic() - began < 30
    assert source.get_buffer_length() > 0
    assert consumed <= source.sample_group_index
    assert threading.active_count() <= threads
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "requests are aborted on the engines")
    names = [task.get_name() for task in asyncio.all_tasks(get_async_loop())]
    assert not [name for name in names if name.startswith("group")]
    half_made = [s for group in source.buffer for s in group if s.response_length and s.reward is None]
    assert not half_made


def test_an_interrupted_rollout_continues_with_the_same_groups(cluster, start):
    args, source = start(sglang_server_concurrency=2)
    for engine in cluster.engines:
        engine.delay = 5.0
    thread = threading.Timer(0.3, lambda: interrupt(ConnectionError("an engine died")))
    thread.start()
    with pytest.raises(ConnectionError):
        generate_rollout_fully_async(args, 0, source)
    worker = fully_async_rollout.get_global_worker(args, source)
    assert not worker.in_flight
    for engine in cluster.engines:
        engine.delay = 0.0
    output = generate_rollout_fully_async(args, 0, source)
    assert set(prompts(output.samples)) <= {f"p{i}" for i in range(12)}
    drawn = [group[0].group_index for group in [*output.samples, *worker.unconsumed()]]
    assert sorted(drawn)[:4] == [0, 1, 2, 3]
    assert len(set(drawn)) == len(drawn)


def test_a_source_without_prompts_is_reported(cluster, start):
    args, source = start()
    source.get_samples = lambda count: []
    with pytest.raises(RuntimeError, match="rollout 0: the data source has no more prompts; 0 of 4 groups are done"):
        generate_rollout_fully_async(args, 0, source)


def test_a_source_that_raises_ends_the_rollout(cluster, start):
    args, source = start()

    def broken(count: int) -> Any:
        raise OSError("the prompt file is gone")

    source.get_samples = broken
    with pytest.raises(OSError, match="the prompt file is gone"):
        generate_rollout_fully_async(args, 0, source)


def test_a_stall_names_the_groups(cluster, start):
    args, source = start(rollout_request_timeout=0.2, sglang_server_concurrency=1)
    for engine in cluster.engines:
        engine.delay = 30.0
    args.custom_generate_function_path = f"{HERE}.hangs"
    with pytest.raises(TimeoutError, match=r"0 of 4 are done, \d in flight, the oldest: group 0 \(samples \[0, 1\]\)"):
        generate_rollout_fully_async(args, 0, source)


async def hangs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(60)
    return sample


def test_a_source_that_takes_nothing_back_is_enough(cluster, start):
    args, _ = start()
    source = RolloutDataSource(args)
    assert len(generate_rollout_fully_async(args, 0, source).samples) == 4


def test_tokens_of_older_weights_are_masked_when_asked_for(cluster, start, clock, monkeypatch):
    async def two_versions(args: Any, group: list[Sample], params: Any, evaluation: bool = False) -> list[Sample]:
        for sample in group:
            spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 5}]
            meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "weight_versions": spans}
            sample.append_response_tokens(tokens=[1] * 5, log_probs=[-1.0] * 5, meta_info=meta)
            sample.reward = 0.0
        return group

    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", two_versions)
    clock.publish(1, 0)
    clock.publish(2, 1)
    args, source = start(partial_rollout=True, mask_offpolicy_in_partial_rollout=True, max_staleness=0)
    output = generate_rollout_fully_async(args, 1, source)
    assert [s.loss_mask for s in iter_samples(output.samples)] == [[0, 0, 0, 1, 1]] * 8
    assert output.metrics["rollout/staleness/masked_tokens"] == 3 * 8
