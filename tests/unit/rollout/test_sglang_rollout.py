"""The default rollout against stand-in engines: order, over-sampling, filters, aborts, partial rollouts, hooks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from slime.rollout import group_stream, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.groups import GroupJob
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.servers.http_client import HttpRequestError
from slime.utils.async_utils import interrupt, run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin import Failure, hashed_reply

HERE = __name__
Status = Sample.Status


def prompt_ids(sample: Sample) -> list[int]:
    return [ord(c) for c in sample.prompt]


def texts(samples: Any) -> list[str]:
    return [sample.prompt for sample in iter_samples(samples)]


def test_one_rollout_has_the_engines_tokens_and_log_probs_in_prompt_order(cluster, make_args):
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    cluster.engines[0].delay = lambda ids: 0.03 if ids[-1] == ord("0") else 0.0  # p0 comes last
    output = generate_rollout(args, 3, source)
    assert texts(output.samples) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    for number, sample in enumerate(iter_samples(output.samples)):
        reply = hashed_reply(prompt_ids(sample), {})
        assert sample.index == number
        assert sample.group_index == number // 2
        assert sample.tokens == prompt_ids(sample) + reply
        assert sample.response == "".join(chr(t) for t in reply)
        assert sample.response_length == len(reply)
        assert sample.loss_mask == [1] * len(reply)
        assert sample.rollout_log_probs == pytest.approx([-0.5 - t / 1000 for t in reply])
        assert sample.status == Status.COMPLETED
        assert sample.reward == 0.0
        assert sample.weight_versions == ["0"]
        assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 1, "total_prompt_tokens": 2}
    assert len({sample.session_id for sample in iter_samples(output.samples)}) == 8
    assert {len(engine.requests) for engine in cluster.engines} == {4}


def test_requests_carry_the_documented_parameters(cluster, make_args):
    args = make_args(
        rollout_temperature=0.7, rollout_top_k=5, rollout_stop=["x"], rollout_stop_token_ids=[7],
        router_policy="manual",
    )  # fmt: skip
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    request = cluster.requests[0]
    assert request["sampling_params"] == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_new_tokens": 16, "stop": ["x"], "stop_token_ids": [7],
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip
    assert request["return_logprob"] is True
    keys = [headers["X-SMG-Routing-Key"] for engine in cluster.engines for headers in engine.headers]
    assert len(set(keys)) == 8


def test_top_p_asks_for_the_top_p_mask_and_deterministic_mode_for_seeds(cluster, make_args):
    deterministic = {"sglang_enable_deterministic_inference": True, "n_samples_per_prompt": 3}
    args = make_args(rollout_top_p=0.9, rollout_top_k=-1, **deterministic)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    seeds = Counter(request["sampling_params"]["sampling_seed"] for request in cluster.requests)
    assert len(seeds) == 4 * 3  # no two samples have the same noise
    assert all(r["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True} for r in cluster.requests)
    assert all(r["return_sampling_mask"] is True for r in cluster.requests)
    assert all(r["custom_labels"] == {"slime_return_sampling_mask": "true"} for r in cluster.requests)
    # engines tell masks under a finite top-k only; half of the most that they tell leaves room for ties
    assert {r["sampling_params"]["top_k"] for r in cluster.requests} == {2048}


def test_groups_begin_only_as_slots_become_free(cluster, make_args, monkeypatch):
    """Waiting groups cost next to nothing; tasks of 100,000 groups would take gigabytes."""
    args = make_args(sglang_server_concurrency=1, rollout_batch_size=40, over_sampling_batch_size=50)
    slots, most, begun = GenerateState(args).semaphore, 0, 0
    generate_job = sglang_rollout.generate_job

    async def counting(args, job):
        nonlocal most, begun
        begun, most = begun + 1, max(most, begun + 1)
        try:
            return await generate_job(args, job)
        finally:
            begun -= 1

    monkeypatch.setattr(sglang_rollout, "generate_job", counting)
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert [sample.index for sample in iter_samples(output.samples)] == list(range(80))
    assert slots.most == 2
    assert 2 <= most <= 20  # a busy machine ends some late; without the wait all 40 would have begun
    assert source.get_buffer_length() == 10
    assert [group[0].group_index for group in source.buffer] == list(range(40, 50))


def test_two_runs_give_the_same_samples(cluster, make_args):
    args = make_args(rollout_shuffle=True)

    def tokens() -> list[list[int]]:
        source = RolloutDataSourceWithBuffer(args)
        outputs = [generate_rollout(args, i, source) for i in range(4)]
        return [sample.tokens for output in outputs for sample in iter_samples(output.samples)]

    assert tokens() == tokens()


def test_long_responses_are_truncated(cluster, make_args):
    args = make_args(rollout_max_response_len=2)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(s.status == Status.TRUNCATED and s.response_length == 2 for s in iter_samples(output.samples))


def test_the_context_limit_shortens_the_response_or_leaves_none(cluster, make_args):
    args = make_args(rollout_max_context_len=4)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {r["sampling_params"]["max_new_tokens"] for r in cluster.requests} == {2}
    assert all(len(s.tokens) == 4 for s in iter_samples(output.samples))
    sent = len(cluster.requests)
    full = Sample(prompt="longer than it", index=0)
    run(sglang_rollout.generate(args, full, {"max_new_tokens": 9}))
    assert full.status == Status.TRUNCATED
    assert len(cluster.requests) == sent


def keep_even_prompts(args: Any, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=int(group[0].prompt[1:]) % 2 == 0, reason="odd")


def test_dropped_groups_are_replaced_and_counted(cluster, make_args):
    args = make_args(
        dynamic_sampling_filter_path=f"{HERE}.keep_even_prompts",
        rollout_all_samples_process_path=f"{HERE}.remember_all",
    )
    source = RolloutDataSourceWithBuffer(args)
    SEEN.clear()
    output = generate_rollout(args, 0, source)
    assert texts(output.samples) == [p for p in ("p0", "p2", "p4", "p6") for _ in range(2)]
    assert output.metrics["rollout/dynamic_filter/drop_odd"] == len(SEEN) - 4
    assert {"p0", "p1", "p2", "p3", "p4", "p6"} <= set(SEEN)
    assert sorted(SEEN, key=lambda p: int(p[1:])) == SEEN


SEEN: list[str] = []


def remember_all(args: Any, groups: list[list[Sample]], get_samples: Any) -> None:
    assert callable(get_samples)
    SEEN.extend(group[0].prompt for group in groups)


def keep_none_unless_needed(args: Any, group: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=False, reason="dull", keep_when_insufficient=True)


def test_a_group_is_kept_when_no_more_are_on_the_way_than_needed(cluster, make_args):
    args = make_args(over_sampling_batch_size=6, dynamic_sampling_filter_path=f"{HERE}.keep_none_unless_needed")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert len(output.samples) == 4
    assert output.metrics["rollout/dynamic_filter/drop_dull"] == 2
    assert len(cluster.requests) == 12  # no second wave


def test_finished_surplus_groups_come_first_in_the_next_rollout(cluster, make_args):
    args = make_args(over_sampling_batch_size=7)
    cluster.engines[0].delay = cluster.engines[1].delay = 0.0
    source = RolloutDataSourceWithBuffer(args)
    drawn: list[str] = []
    for rollout_id in range(4):
        output = generate_rollout(args, rollout_id, source)
        assert len(output.samples) == 4
        drawn += [group[0].prompt for group in output.samples]
    finished = [group for group in source.buffer if all(s.status == Status.COMPLETED for s in group)]
    served = Counter(drawn + [group[0].prompt for group in finished])
    put_back = [sample for group in source.buffer if group not in finished for sample in group]
    assert all((s.status, s.tokens, s.reward) == (Status.PENDING, [], None) for s in put_back)
    generated = Counter(chr(r["input_ids"][0]) + "".join(map(chr, r["input_ids"][1:])) for r in cluster.requests)
    # each group was generated once, and nothing that finished was thrown away
    assert all(served[p] <= generated[p] // 2 for p in served)
    assert max(Counter(drawn).values()) <= 2


def slow_for(letter: str):
    return lambda ids: 60.0 if chr(ids[1]) in letter else 0.0


def test_without_partial_rollout_unfinished_groups_are_cancelled_on_the_engines(cluster, make_args):
    args = make_args(over_sampling_batch_size=6)
    for engine in cluster.engines:
        engine.delay = slow_for("01")
    source = RolloutDataSourceWithBuffer(args)
    began = time.monotonic()
    output = generate_rollout(args, 0, source)
    assert texts(output.samples)[::2] == ["p2", "p3", "p4", "p5"]
    assert time.monotonic() - began < 30
    assert sum(chr(r["input_ids"][1]) in "01" for r in cluster.requests) == 4
    assert [engine.aborts for engine in cluster.engines] == [[{"abort_all": True}]] * 2  # not one by one
    assert not any(engine.running for engine in cluster.engines)
    # their prompts are not skipped: they come first in the next rollout, as they were drawn
    assert source.buffer == RolloutDataSource(args).get_samples(2)
    assert output.metrics["rollout/put_back_groups"] == 2
    for engine in cluster.engines:
        engine.delay = 0.0
    again = generate_rollout(args, 1, source)
    assert texts(again.samples)[:4:2] == ["p0", "p1"]


async def scribble(args: Any, sample: Sample, params: Any) -> Sample:
    """A custom generate function that changes the sample it is given, and is cancelled in the middle for p0 and p1."""
    sample.metadata["turns"] = sample.metadata.get("turns", 0) + 1
    sample.metadata.setdefault("seen", []).append("x")
    sample.tokens.append(1)
    sample.spec_info.completion_token_num += 1
    sample.note = "scribbled"
    if sample.prompt in ("p0", "p1"):
        sample.response, sample.response_length, sample.reward = "half", 4, 0.5
        await asyncio.sleep(30)
    return await sglang_rollout.generate(args, replace(sample, tokens=[], metadata={}), params)


def test_what_a_custom_function_did_to_a_group_is_undone_when_it_is_put_back(cluster, make_args):
    args = make_args(over_sampling_batch_size=6, custom_generate_function_path=f"{HERE}.scribble")
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert texts(output.samples)[::2] == ["p2", "p3", "p4", "p5"]
    assert source.buffer == RolloutDataSource(args).get_samples(2)
    assert not any(hasattr(sample, "note") for sample in iter_samples(source.buffer))


def test_partial_rollout_continues_where_it_stopped(cluster, make_args):
    args = make_args(over_sampling_batch_size=6, partial_rollout=True)
    for engine in cluster.engines:
        engine.delay = lambda ids: 0.15 if chr(ids[1]) in "01" else 0.03
        engine.reply = lambda ids, params: [97 + len(ids) + i for i in range(8 - (len(ids) - 2))]
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 5, source)
    assert texts(output.samples)[::2] == ["p2", "p3", "p4", "p5"]
    assert output.metrics["rollout/partial_groups"] == 2
    left = list(iter_samples(source.buffer))
    assert texts(left) == ["p0", "p0", "p1", "p1"]
    for sample in left:
        assert sample.status == Status.ABORTED
        assert 0 < sample.response_length < 8
        assert sample.reward is None
        assert sample.metadata["start_rollout_id"] == 5
    had = [(sample.index, list(sample.tokens), list(sample.rollout_log_probs)) for sample in left]
    for engine in cluster.engines:
        engine.delay = 0.0
        engine.weight_version = "1"
    output = generate_rollout(args, 6, source)
    by_index = {sample.index: sample for sample in iter_samples(output.samples)}
    for index, tokens, log_probs in had:
        sample = by_index[index]
        assert sample.tokens[: len(tokens)] == tokens
        assert sample.rollout_log_probs[: len(log_probs)] == log_probs
        assert sample.response_length == 8
        assert sample.loss_mask == [1] * 8
        assert sample.status == Status.COMPLETED
        assert sample.weight_versions == ["0", "1"]
        assert sample.metadata["start_rollout_id"] == 5


async def test_tokens_without_a_text_yet_have_begun_too():
    """The first byte of a character of several."""
    sample = Sample(index=0, tokens=[112, 240], response_length=1, response="", status=Status.ABORTED)

    async def generate(job: GroupJob) -> None:
        job.result = [sample]

    job = GroupJob([Sample(index=0)])
    task = job.begin(generate)
    await task
    group_stream._to_resume(task, job, 4)
    assert sample.metadata["start_rollout_id"] == 4


def test_off_policy_tokens_of_a_partial_rollout_are_masked(cluster, make_args):
    args = make_args(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    GenerateState(args)
    sample = Sample(prompt="p0", index=0, status=Status.ABORTED, tokens=[112, 48, 97, 98], response="ab",
                    response_length=2, rollout_log_probs=[-1.0, -1.0], label="l0")  # fmt: skip
    result = run(sglang_rollout.generate_and_rm(args, sample, {"max_new_tokens": 16}))
    new = hashed_reply([112, 48, 97, 98], {})
    assert result.loss_mask == [0, 0] + [1] * len(new)
    assert cluster.requests[0]["sampling_params"]["max_new_tokens"] == 14


def test_an_abort_by_the_engine_alone_is_resumed(cluster, make_args):
    args = make_args(rollout_batch_size=1, over_sampling_batch_size=1, n_samples_per_prompt=1)
    for engine in cluster.engines:
        engine.delay = 0.05
        engine.reply = lambda ids, params: [97] * (10 - (len(ids) - 2))
    source = RolloutDataSourceWithBuffer(args)

    async def rollout_with_a_pause() -> Any:
        task = asyncio.create_task(sglang_rollout.generate_rollout_async(args, 0, source.get_samples))
        await asyncio.sleep(0.22)
        for engine in cluster.engines:
            for stop in list(engine.running.values()):
                cluster.server.loop.call_soon_threadsafe(stop.set)
        return await task

    output, handed_back = run(rollout_with_a_pause())
    sample = output.samples[0][0]
    assert sample.status == Status.COMPLETED
    assert sample.response_length == 10
    assert len(sample.weight_versions) == 2
    assert handed_back == []


def test_an_engine_that_dies_costs_no_sample(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 0.05
    source = RolloutDataSourceWithBuffer(args)

    async def rollout_with_a_death() -> Any:
        task = asyncio.create_task(sglang_rollout.generate_rollout_async(args, 0, source.get_samples))
        while not cluster.engines[0].running:
            await asyncio.sleep(0.01)
        await asyncio.get_running_loop().run_in_executor(None, cluster.kill_engine, 0)
        return await task

    output, _ = run(rollout_with_a_death())
    for sample in iter_samples(output.samples):
        assert sample.tokens == prompt_ids(sample) + hashed_reply(prompt_ids(sample), {})


def test_a_refused_request_fails_at_once_and_names_the_sample(cluster, make_args):
    args = make_args()
    cluster.engines[1].failures.append(Failure(400, b'{"error":"too long"}'))
    with pytest.raises(HttpRequestError, match="too long") as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert any("while generating group" in note for note in caught.value.__notes__)
    state = GenerateState(args)
    assert state.pendings == set()
    assert state.remaining_batch_size == 0
    output = generate_rollout(args, 1, RolloutDataSourceWithBuffer(args))  # the process can continue
    assert len(output.samples) == 4


def test_a_rollout_without_progress_ends_at_its_deadline(cluster, make_args):
    args = make_args(rollout_request_timeout=0.3, custom_generate_function_path=f"{HERE}.never_answers")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no group finished for 0.6 s.*group 0 \(samples \[0, 1\]\) for"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert 0.5 < time.monotonic() - began < 60


async def never_answers(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(1000)
    return sample


def test_a_hanging_engine_ends_at_the_request_deadline(cluster, make_args):
    args = make_args(rollout_request_timeout=0.4)
    for engine in cluster.engines:
        engine.delay = 300.0
    with pytest.raises(TimeoutError, match=r"/generate was not answered within its deadline of 0.4 s"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "all requests aborted")


def test_interrupt_ends_a_rollout_with_its_reason(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 300.0
    import threading

    def when_running() -> None:
        cluster.wait_until(lambda: all(e.running for e in cluster.engines), "requests running")
        interrupt(RuntimeError("engine 1 died: exit code -9"))

    watcher = threading.Thread(target=when_running)
    watcher.start()
    with pytest.raises(RuntimeError, match="engine 1 died"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    watcher.join()
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "all requests aborted")


async def shout(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    sample.tokens = [1, 2]
    sample.response = "EVAL" if evaluation else "TRAIN"
    sample.append_response_tokens(tokens=[3], log_probs=[-0.1])
    sample.status = Status.COMPLETED
    return sample


async def two_siblings(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    out = []
    for part in range(2):
        sibling = Sample.from_dict(sample.to_dict())
        sibling.rollout_id = sample.index
        sibling.tokens, sibling.response = [1], ""
        sibling.append_response_tokens(tokens=[part], log_probs=[-0.1], text=f"part {part}")
        sibling.status = Status.COMPLETED
        out.append(sibling)
    return out


async def rm_batch(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(len(samples)) for _ in samples]


def test_evaluation_is_passed_to_a_custom_generate_function_only_if_it_asks(cluster, make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.shout")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {s.response for s in iter_samples(output.samples)} == {"TRAIN"}
    sample = run(sglang_rollout.generate_and_rm(args, Sample(prompt="x", label="l"), {}, evaluation=True))
    assert sample.response == "EVAL"


def test_fan_out_lists_are_scored_in_one_batch_and_kept_nested(cluster, make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.two_siblings", custom_rm_path=f"{HERE}.rm_batch")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [len(group) for group in output.samples] == [2, 2, 2, 2]
    assert all(len(trajectory) == 2 for group in output.samples for trajectory in group)
    assert {s.reward for s in iter_samples(output.samples)} == {2.0}


FANOUT_STARTED: list[int] = []


async def fan_out_or_hang(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    if sample.prompt in ("p0", "p1") and not FANOUT_STARTED and sample.index % 2:
        sample.response = "half-done"
        sample.tokens, sample.response_length = [1, 2], 1
        await asyncio.sleep(30)
    return await two_siblings(args, sample, sampling_params)


def test_fan_out_groups_survive_a_partial_rollout(cluster, make_args, monkeypatch):
    monkeypatch.setattr("slime.rollout.group_stream.FINISH_GRACE_S", 0.2)
    args = make_args(
        over_sampling_batch_size=6, partial_rollout=True, custom_generate_function_path=f"{HERE}.fan_out_or_hang",
        custom_rm_path=f"{HERE}.rm_batch",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    FANOUT_STARTED.clear()
    output = generate_rollout(args, 0, source)
    assert texts(output.samples)[::4] == ["p2", "p3", "p4", "p5"]
    assert len(source.buffer) == 2
    hung = [s for s in iter_samples(source.buffer) if s.index is not None and s.index % 2]
    assert all(s.response == "" and s.tokens == [] and s.status == Status.PENDING for s in hung)
    FANOUT_STARTED.append(1)
    output = generate_rollout(args, 1, source)
    assert texts(output.samples)[::4][:2] == ["p0", "p1"]
    assert all(s.reward == 2.0 for s in iter_samples(output.samples))


async def group_reward(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    assert len({s.group_index for s in samples}) == 1
    return [float(i) for i in range(len(samples))]


def test_group_rm_scores_whole_groups(cluster, make_args):
    args = make_args(group_rm=True, custom_rm_path=f"{HERE}.group_reward")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in iter_samples(output.samples)] == [0.0, 1.0] * 4


async def failing_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    raise KeyError("judge")


def test_an_error_in_a_custom_reward_names_the_sample(cluster, make_args):
    args = make_args(custom_rm_path=f"{HERE}.failing_reward")
    with pytest.raises(RuntimeError, match=r"5 of [5-8] rewards failed") as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for said in (
        "the first: sample index=",
        "in failing_reward",
        "KeyError: 'judge'",
        "computing the reward of samples [",
    ):
        assert said in str(caught.value)


def add_tag(args: Any, sample: Sample, rollout_id: int | None = None) -> None:
    sample.metadata = {**sample.metadata, "tag": rollout_id}


async def shorten(args: Any, sample: Sample, **kwargs: Any) -> Sample:
    assert sample.metadata["tag"] == 9
    assert kwargs == {"rollout_id": 9, "evaluation": False}
    sample.response = sample.response[:1]
    return sample


def return_a_string(args: Any, sample: Sample) -> str:
    return "no sample"


def remove_first_group(args: Any, groups: list[list[Sample]]) -> None:
    assert [len(group) for group in groups] == [2, 2, 2, 2]
    for sample in groups[0]:
        sample.remove_sample = True


def test_sample_hooks_and_filters_run_in_order(cluster, make_args):
    args = make_args(
        rollout_sample_hook_path=[f"{HERE}.add_tag", f"{HERE}.shorten"],
        rollout_sample_filter_path=f"{HERE}.remove_first_group",
    )
    output = generate_rollout(args, 9, RolloutDataSourceWithBuffer(args))
    assert all(len(s.response) == 1 for s in iter_samples(output.samples))
    assert [s.remove_sample for s in iter_samples(output.samples)] == [True, True] + [False] * 6


def test_a_hook_that_returns_something_else_is_refused(cluster, make_args):
    args = make_args(rollout_sample_hook_path=[f"{HERE}.return_a_string"])
    with pytest.raises(TypeError, match=r"return_a_string.*returned str"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_names_of_the_module_can_be_patched(cluster, make_args, monkeypatch):
    args = make_args()
    monkeypatch.setattr(sglang_rollout, "generate", shout)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {s.response for s in iter_samples(output.samples)} == {"TRAIN"}
    assert cluster.requests == []


def test_the_request_limit_holds(cluster, make_args):
    args = make_args(sglang_server_concurrency=2, rollout_batch_size=8, over_sampling_batch_size=8)
    for engine in cluster.engines:
        engine.delay = 0.005
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert sum(engine.max_running for engine in cluster.engines) <= 4


def test_messages_as_prompt_are_refused_with_a_way_out(cluster, make_args):
    args = make_args()
    with pytest.raises(ValueError, match="--apply-chat-template"):
        run(sglang_rollout.generate(args, Sample(prompt=[{"role": "user", "content": "x"}]), {"max_new_tokens": 4}))


def test_model_urls():
    args = run_args(sglang_router_ip="::1", sglang_router_port=5)
    assert sglang_rollout.get_model_url(args, "actor") == "http://[::1]:5/generate"
    args.sglang_model_routers = {"judge": ("10.0.0.1", 7)}
    assert sglang_rollout.get_model_url(args, "judge", "/x") == "http://10.0.0.1:7/x"
    assert sglang_rollout.get_model_url(args, "actor", "/x") == "http://[::1]:5/x"


def test_urls_of_several_models():
    args = run_args(sglang_router_ip="10.0.0.1", sglang_router_port=5)
    args.sglang_model_routers = {"actor": ("10.0.0.1", 5), "judge": ("10.0.0.1", 7)}
    assert sglang_rollout.get_model_url(args, "judge", "") == "http://10.0.0.1:7"
    for name in ("actor", "default"):
        assert sglang_rollout.get_model_url(args, name, "") == "http://10.0.0.1:5"
    with pytest.raises(ValueError, match=r"no model 'juge' is served \(--sglang-config\); there are actor, judge"):
        sglang_rollout.get_model_url(args, "juge")


def test_the_way_from_a_group_to_its_request_is_short(cluster, make_args, monkeypatch):
    """``generate_and_rm_group`` starts a task per sample, which calls no more than these before ``post``."""
    ways, post = set(), sglang_rollout.post

    async def watched(*args: Any, **kwargs: Any) -> Any:
        way, frame = [], sys._getframe(1)
        while frame is not None and "asyncio" not in frame.f_code.co_filename:
            way.append(frame.f_code.co_name)
            frame = frame.f_back
        ways.add(tuple(reversed(way)))
        return await post(*args, **kwargs)

    monkeypatch.setattr(sglang_rollout, "post", watched)
    args = make_args()
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert ways == {("generate_and_rm", "call_generate", "generate")}


def test_the_module_does_not_import_ray():
    assert "ray" not in {name.partition(".")[0] for name in vars(sys.modules["slime.rollout.sglang_rollout"])}
    assert load_function("slime.rollout.sglang_rollout.generate") is sglang_rollout.generate
