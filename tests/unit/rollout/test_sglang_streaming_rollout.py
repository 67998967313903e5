"""Streamed generation against stand-in engines: the same samples, and nothing lost of an answer that breaks off."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from slime.rollout import sglang_streaming_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.rollout.sglang_streaming_rollout import _GrowingAnswer, generate_streaming
from slime.servers import http_client
from slime.servers.http_utils import HttpRequestError, HttpTimeoutError, get_http_client
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.standin import Failure

PATH = "slime.rollout.sglang_streaming_rollout.generate_streaming"
WHOLE = [97 + i for i in range(12)]
PARAMS = {"max_new_tokens": 16, "temperature": 1.0}
Status = Sample.Status


@pytest.fixture(autouse=True)
def a_long_answer(cluster, monkeypatch):
    """Every prompt is one token long; a request that brings some of the answer gets the rest."""
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    for engine in cluster.engines:
        engine.reply = lambda ids, params: WHOLE[len(ids) - 1 :]


def check(sample: Sample, pieces: int, tokens: list[int] = WHOLE) -> None:
    assert sample.tokens == [ord("p"), *tokens]
    assert sample.response == "".join(map(chr, tokens))
    assert sample.rollout_log_probs == [-0.5 - token / 1000 for token in tokens]
    assert sample.loss_mask == [1] * len(tokens)
    assert sample.response_length == len(tokens)
    assert len(sample.weight_versions) == pieces
    assert [(s["version"], s["start"], s["end"]) for s in sample.weight_version_spans] == [("0", 0, len(tokens))]


@pytest.mark.parametrize("spoil", ["nan", "old"])
def test_nothing_is_kept_of_an_answer_that_cannot_be_trained_on(cluster, make_args, spoil):
    args = make_args()
    client = get_http_client()
    client.answers.oldest_version[cluster.router.url] = 0
    for engine in cluster.engines:
        engine.delay = 0.002
        engine.failures.append(Failure(spoil=spoil))
    sample = Sample(index=0, prompt="p")
    run(generate_streaming(args, sample, PARAMS))
    assert sample.tokens == [ord("p"), *WHOLE]
    assert sample.rollout_log_probs == [-0.5 - token / 1000 for token in WHOLE]
    assert set(sample.weight_versions) == {"0"}
    assert client.answers.rejected.total() == 2


def test_the_sample_is_that_of_the_unstreamed_reply(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 0.002
    streamed, whole = Sample(index=0, prompt="p"), Sample(index=0, prompt="p")
    assert run(generate_streaming(args, streamed, PARAMS)) is streamed
    run(generate(args, whole, PARAMS))
    del streamed.trace, whole.trace
    assert streamed == whole
    assert streamed.to_dict() == whole.to_dict()
    check(streamed, 1)
    assert streamed.status is Status.COMPLETED
    asked_whole, asked = sorted(cluster.requests, key=lambda request: "stream" in request)
    for request in (asked, asked_whole):
        del request["rid"]
    assert {"stream": True, **asked_whole} == {**asked}


def test_the_limit_and_the_span_are_those_of_every_request(cluster, make_args):
    args = make_args()
    sample = run(generate_streaming(args, Sample(index=0, prompt="p"), {"max_new_tokens": 5}))
    check(sample, 1, WHOLE[:5])
    assert sample.status is Status.TRUNCATED
    assert [e["name"] for e in sample.trace["events"]] == ["sglang_generate_stream"] * 2
    sample.status = Status.ABORTED
    run(generate_streaming(args, sample, {"max_new_tokens": 5}))
    assert (sample.status, len(cluster.requests)) == (Status.TRUNCATED, 1)
    with pytest.raises(AssertionError, match="cannot be generated from status"):
        run(generate_streaming(args, sample, {"max_new_tokens": 5}))


async def until_some(sample: Sample) -> None:
    while not sample.response_length:
        await asyncio.sleep(0.002)


def test_an_abort_stops_the_reader_with_what_has_arrived(cluster, make_args):
    args = make_args()
    state = GenerateState(args)
    for engine in cluster.engines:
        engine.delay = 0.02

    async def abort_in_the_middle() -> Sample:
        sample = Sample(index=0, prompt="p")
        task = asyncio.create_task(generate_streaming(args, sample, PARAMS))
        await until_some(sample)
        assert sample.status is Status.PENDING
        state.aborted = True
        await task
        await get_http_client().drain_aborts()
        return sample

    sample = run(abort_in_the_middle())
    assert sample.status is Status.ABORTED
    assert 0 < sample.response_length < len(WHOLE)
    check(sample, 1, WHOLE[: sample.response_length])
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "nothing runs on the engines")
    assert {abort["rid"] for e in cluster.engines for abort in e.aborts} == {cluster.requests[0]["rid"]}
    state.aborted = False
    check(run(generate_streaming(args, sample, PARAMS)), 2)
    assert sample.status is Status.COMPLETED


def test_a_cancelled_request_leaves_what_has_arrived(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 0.02

    async def cancel_in_the_middle() -> Sample:
        sample = Sample(index=0, prompt="p")
        task = asyncio.create_task(generate_streaming(args, sample, PARAMS))
        await until_some(sample)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await get_http_client().drain_aborts()
        return sample

    sample = run(cancel_in_the_middle())
    assert sample.status is Status.ABORTED
    check(sample, 1, WHOLE[: sample.response_length])
    check(run(generate_streaming(args, sample, PARAMS)), 2)


def test_a_stream_that_breaks_off_continues_elsewhere(cluster, make_args, caplog):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 0.002
    cluster.engines[1].failures.append(Failure(truncated=True))
    with caplog.at_level(logging.WARNING):
        sample = run(generate_streaming(args, Sample(index=7, prompt="p"), PARAMS))
    check(sample, 2)
    first, second = [len(e.requests[0]["input_ids"]) for e in (cluster.engines[1], cluster.engines[0])]
    assert first == 1 < second
    assert "the stream of sample index=7 was lost" in caplog.text


def test_engines_that_abort_for_an_update_are_asked_again(cluster, make_args):
    args = make_args()
    for engine in cluster.engines:
        engine.delay = 0.02

    async def pause_in_the_middle() -> Sample:
        sample = Sample(index=0, prompt="p")
        task = asyncio.create_task(generate_streaming(args, sample, PARAMS))
        await until_some(sample)
        for engine in cluster.engines:
            url = engine.url
            await get_http_client().post(f"{url}/pause_generation", {})
            await get_http_client().post(f"{url}/update_weights_from_disk", {"weight_version": "1"})
            await get_http_client().post(f"{url}/continue_generation", {})
        return await task

    sample = run(pause_in_the_middle())
    assert sample.tokens == [ord("p"), *WHOLE]
    assert sample.weight_versions[-1] == "1"
    spans = sample.weight_version_spans
    assert [span["version"] for span in spans] == ["0", "1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], len(WHOLE))


def test_a_hang_ends_at_the_deadline_of_an_event_and_names_the_engines(cluster, make_args):
    args = make_args(rollout_request_timeout=0.3)
    for engine in cluster.engines:
        engine.delay = 60.0
    with pytest.raises(HttpTimeoutError, match=r"sent nothing for 0\.3 s") as caught:
        run(generate_streaming(args, Sample(index=0, prompt="p"), PARAMS))
    assert "holds" in " ".join(caught.value.__notes__)


def test_a_partial_rollout_keeps_the_tokens(cluster, make_args):
    args = make_args(custom_generate_function_path=PATH, partial_rollout=True, over_sampling_batch_size=8)
    args.rollout_batch_size = 1
    for engine in cluster.engines:
        engine.delay = lambda ids: 0.03 if ids[:2] == [ord("p"), ord("0")] else 0.05
        engine.reply = lambda ids, params: WHOLE[sum(token >= WHOLE[0] for token in ids[1:]) :]
    source = RolloutDataSourceWithBuffer(args)
    first = list(iter_samples(generate_rollout(args, 0, source).samples))
    kept = [s for s in iter_samples(source.buffer) if s.response_length]
    assert kept
    assert all(s.status is Status.ABORTED and s.metadata["start_rollout_id"] == 0 for s in kept)
    held = {s.index: list(s.tokens) for s in kept}
    for engine in cluster.engines:
        engine.delay = 0.0
    args.rollout_batch_size = args.over_sampling_batch_size = len(source.buffer)
    rest = list(iter_samples(generate_rollout(args, 1, source).samples))
    for sample in [*first, *rest]:
        assert sample.response == "".join(map(chr, WHOLE))
        assert sample.tokens[: len(held.get(sample.index, []))] == held.get(sample.index, [])


def event(text: str, reason: dict | None = None, **meta) -> dict:
    tokens = [ord(c) for c in text]
    reported = [[-1.0, token, None] for token in tokens]
    return {"text": text, "meta_info": {"finish_reason": reason, "output_token_logprobs": reported, **meta}}


def test_events_that_bring_only_new_tokens_are_refused():
    answer = _GrowingAnswer(None, Sample(index=3))
    answer.take(event("ab", completion_tokens=2), "url")
    with pytest.raises(ValueError, match=r"sample index=3: .* 1 of 3 tokens.*--sglang-incremental-streaming-output"):
        answer.take(event("c", completion_tokens=3), "url")


@pytest.mark.parametrize("status", [400, 500])
def test_an_input_that_the_engine_refuses_while_streaming_is_an_error(status):
    answer = _GrowingAnswer(None, Sample(index=3))
    refused = {"type": "abort", "status_code": status, "message": "longer than the context length 7"}
    with pytest.raises(HttpRequestError, match="context length 7"):
        answer.take(event("", refused), "url")


def test_an_engine_without_room_is_asked_again(cluster, make_args, monkeypatch):
    """Its queue was full thirty times, which it says in an event: more often than aborts are resumed in vain."""
    monkeypatch.setattr(sglang_streaming_rollout, "FIRST_PAUSE_S", 0.0)
    busy = event("", {"type": "abort", "status_code": 503, "message": "the queue is full"}, completion_tokens=0)
    line = b"data: " + json.dumps(busy).encode() + b"\n\ndata: [DONE]\n\n"
    cluster.engines[0].failures.extend([Failure(200, line)] * 15)
    cluster.engines[1].failures.extend([Failure(200, line)] * 15)
    check(run(generate_streaming(make_args(), Sample(index=0, prompt="p"), PARAMS)), 1)
    assert len(cluster.requests) == 31
    cluster.engines[0].failures.extend([Failure(200, line)] * 1000)
    cluster.engines[1].failures.extend([Failure(200, line)] * 1000)
    with pytest.raises(HttpTimeoutError, match=r"was turned away for 0\.2 s"):
        run(generate_streaming(make_args(rollout_request_timeout=0.2), Sample(index=0, prompt="p"), PARAMS))


def test_counters_and_lists_grow_once_however_many_events_come():
    sample = Sample(index=3, tokens=[1], weight_versions=["0"], response="x", response_length=0)
    sample.prefix_cache_info.cached_tokens = 5
    answer = _GrowingAnswer(None, sample)
    meta = {"cached_tokens": 2, "prompt_tokens": 4, "weight_version": "1"}
    for text in ("a", "ab", "abc"):
        answer.take(event(text, **meta), "url")
    answer.take(event("abcd", {"type": "stop"}, **meta), "url")
    answer.close()
    assert (sample.response, sample.tokens, sample.weight_versions) == ("xabcd", [1, *b"abcd"], ["0", "1"])
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (7, 4)
