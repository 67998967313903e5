"""The stand-in engine: its wire format, slots, pauses, faults and seeded lengths; reduced forms of the benchmarks."""

from __future__ import annotations

import asyncio
import math
import socket
import statistics
from types import SimpleNamespace

import aiohttp
import pytest

from benchmarks import client, partial_rollout, slots
from slime.servers.http_client import HttpClient
from tests.support.standin import FaultMix, FixedReply, LognormalLengths, LognormalTimes, StandInCluster
from tests.support.standin.engine import Failure
from tests.support.standin.wire import Listener

pytestmark = pytest.mark.slow

REQUEST = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}


@pytest.fixture
async def http():
    one = HttpClient(16, request_timeout=10.0)
    yield one
    await one.close()


async def test_a_reply_has_the_fields_of_the_wire_format(http):
    with StandInCluster(1, reply=FixedReply(6), weight_version="7") as cluster:
        reply = await http.post(f"{cluster.engines[0].url}/generate", {**REQUEST, "rid": "mine"})
    meta = reply["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == reply["output_ids"] == [97, 98, 99, 100]
    assert (meta["id"], meta["finish_reason"]["type"], meta["weight_version"]) == ("mine", "length", "7")
    assert (meta["prompt_tokens"], meta["completion_tokens"], reply["text"]) == (2, 4, "abcd")


async def test_requests_beyond_the_slots_wait_and_can_be_aborted_there(http):
    with StandInCluster(1, reply=FixedReply(4), duration=lambda ids: 0.1, slots=2) as cluster:
        engine = cluster.engines[0]
        url = engine.url
        sent = [asyncio.create_task(http.post(f"{url}/generate", {**REQUEST, "rid": str(i)})) for i in range(5)]
        while (await http.get(f"{url}/v1/loads"))["loads"] != [{"num_running_reqs": 2, "num_waiting_reqs": 3}]:
            await asyncio.sleep(0.005)
        await http.post(f"{url}/abort_request", {"rid": next(iter(engine.waiting))})
        replies = await asyncio.gather(*sent)
        stats = await http.get(f"{url}/stats")
    kinds = sorted((r["meta_info"]["finish_reason"]["type"], r["meta_info"]["completion_tokens"]) for r in replies)
    assert kinds == [("abort", 0)] + [("stop", 4)] * 4
    assert stats["slot_seconds"] == pytest.approx(0.4, rel=0.5)


async def test_a_paused_engine_aborts_what_runs_and_starts_nothing(http):
    with StandInCluster(1, reply=FixedReply(4), duration=lambda ids: 0.3) as cluster:
        url = cluster.engines[0].url
        running = asyncio.create_task(http.post(f"{url}/generate", REQUEST))
        while not cluster.engines[0].running:
            await asyncio.sleep(0.005)
        await http.post(f"{url}/pause_generation", {})
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        held = asyncio.create_task(http.post(f"{url}/generate", REQUEST))
        await asyncio.sleep(0.1)
        assert not held.done()
        await http.post(f"{url}/update_weights_from_disk", {"model_path": "x", "weight_version": "3"})
        await http.post(f"{url}/continue_generation", {})
        assert (await held)["meta_info"]["weight_version"] == "3"


async def test_a_truncated_reply_breaks_off_in_its_body():
    with StandInCluster(1, reply=FixedReply(50)) as cluster:
        cluster.engines[0].failures.append(Failure(truncated=True))
        async with aiohttp.ClientSession() as session:
            reply = await session.post(f"{cluster.engines[0].url}/generate", json=REQUEST)
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await reply.read()


def test_seeded_times_lengths_and_faults():
    times = LognormalTimes(0.2, 0.8, seed=3)
    drawn = [times([]) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(0.8, rel=0.03)
    again = LognormalTimes(0.2, 0.8, seed=3)
    assert [again([]) for _ in range(3)] == drawn[:3]
    lengths = LognormalLengths(100, 1000, 10**6)
    ordered = sorted(lengths.draw() for _ in range(20_000))
    assert ordered[10_000] == pytest.approx(100, rel=0.05)
    assert ordered[19_800] == pytest.approx(1000, rel=0.1)
    mix = FaultMix([(0.1, Failure(503)), (0.2, Failure(cut=True))])
    faults = [mix.draw() for _ in range(10_000)]
    assert sum(f is not None and f.status == 503 for f in faults) == pytest.approx(1000, rel=0.15)
    assert sum(f is not None and f.cut for f in faults) == pytest.approx(2000, rel=0.15)


def test_an_aborted_response_is_continued_to_its_own_length():
    lengths = LognormalLengths(50, 500, 1000, seed=5)
    prompt = [100, 101]
    whole = lengths(prompt, {})
    assert prompt + whole == prompt + whole[:7] + lengths(prompt + whole[:7], {})


def test_the_client_benchmark_compares_both_clients(capsys):
    pytest.importorskip("httpx", reason="the other client of the comparison")
    client.compare(tokens=16, concurrency=4, repeats=1, seconds=0.1)
    lines = capsys.readouterr().out.splitlines()
    assert [line[14:28].strip() for line in lines] == ["slime", "httpx", "httpx + orjson"]
    assert float(lines[0].split()[6].strip("[,]")) == 1.0


def test_the_slots_benchmark_measures_the_engines_time():
    run = slots.measure(mean=0.05, slots=4, concurrency=16, seconds=0.5, over_sampling=True, seed=0)
    assert run.samples >= 2 * 4 * 8
    assert 0.3 < run.slot_use(4) <= 1.001
    assert run.in_flight_seconds / run.seconds <= 16
    assert run.counts["slot_seconds"] < run.in_flight_seconds


def test_an_engine_with_a_full_queue_refuses():
    run = slots.measure(0.05, 4, 16, 0.5, over_sampling=False, seed=0, max_waiting=2)
    assert run.samples >= 2 * 4 * 8
    assert run.counts["refused"] > 0
    assert run.counts["received"] - run.counts["refused"] == run.counts["finished"] == run.samples


def test_partial_rollouts_waste_no_token():
    words = SimpleNamespace(median=20, token_seconds=0.001, slots=8, groups=6, rollouts=2)
    wasted = {}
    for way in ("over-sampling", "and partial"):
        run = partial_rollout.measure(way, words, seed=0)
        assert run.samples == 2 * 6 * partial_rollout.SAMPLES_PER_PROMPT
        wasted[way] = run.counts["tokens"] - run.trained_tokens - run.kept_tokens
    assert wasted["and partial"] == 0
    assert wasted["over-sampling"] > 0


@pytest.mark.parametrize("passes", range(6))
async def test_a_dead_engine_resets_a_connection_in_every_state(passes):
    """``passes``: how often the event loop ran since the client connected; the connection is accepted in one of them
    and attached to its server in a later one."""

    async def never(request):
        await asyncio.Event().wait()

    listener = Listener(never)
    await listener.start()
    with socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2])), 5) as client:
        for _ in range(passes):
            await asyncio.sleep(0)
        await listener.drop_dead()
        client.setblocking(False)
        try:
            left = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5)
        except ConnectionResetError:
            left = b""
    assert left == b""
