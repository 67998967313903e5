"""The HTTP client against stand-in engines: retries, deadlines, cancellation, keys."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import psutil
import pytest

from slime.servers import http_client, http_utils
from slime.servers.http_client import HttpClient, HttpRequestError, HttpTimeoutError
from slime.servers.http_replies import MOST_REJECTED
from slime.utils.network import find_available_port
from tests.support.arguments import run_args
from tests.support.standin import Failure, FaultMix, ServerThread, StandInCluster

REQUEST = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(http_client, "WORKER_LIST_AGE_S", 0.0)
    with StandInCluster(2) as running:
        yield running


@pytest.fixture
async def client():
    one = HttpClient(16, request_timeout=10.0)
    yield one
    await one.close()


async def test_replies_are_json_or_text(cluster, client):
    url = cluster.engines[0].url
    assert (await client.get(f"{url}/model_info"))["model_path"] == "stand-in"
    assert await client.post(f"{url}/abort_request", {"rid": "none"}) == ""
    assert await client.post(f"{url}/abort_request", None) == ""
    assert cluster.engines[0].aborts[-1] == {}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_statuses_that_say_later_are_retried(cluster, client, status):
    cluster.engines[0].failures.extend([Failure(status, b"busy")] * 3)
    reply = await client.post(f"{cluster.engines[0].url}/generate", REQUEST)
    assert reply["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    rids = [request["rid"] for request in cluster.engines[0].requests]
    assert len(rids) == 4
    assert len(set(rids)) == 4


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500, 501])
async def test_other_errors_are_final_and_carry_the_body(cluster, client, status):
    cluster.engines[0].failures.append(Failure(status, b'{"error":{"message":"context length is 5"}}'))
    with pytest.raises(HttpRequestError, match="context length is 5") as caught:
        await client.post(f"{cluster.engines[0].url}/generate", REQUEST)
    error = caught.value
    assert (error.status, error.attempts, error.url) == (status, 1, f"{cluster.engines[0].url}/generate")
    assert len(cluster.engines[0].requests) == 1


WITH_LOG_PROBS = {**REQUEST, "return_logprob": True}


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        ("nan", "token 3 of 4 has the log-prob None"),
        ("short", "3 log-probs came with 4 tokens"),
        ("old", "it was generated with weight version default, and version 2 was asked"),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_asked_for_elsewhere(cluster, client, spoil, wrong):
    """From the second try on straight from another engine: a router would find the same one by the prompt."""
    for engine in cluster.engines:
        engine.weight_version = "2"
    cluster.engines[0].faults = FaultMix([(1.0, Failure(spoil=spoil))])
    told = []
    client.answers.report = lambda *words: told.append(words)
    client.answers.oldest_version[cluster.router.url] = 2
    for _ in range(2):
        reply = await client.post(f"{cluster.router.url}/generate", WITH_LOG_PROBS)
        assert len(reply["meta_info"]["output_token_logprobs"]) == 4
        assert all(log_prob < 0 for log_prob, *_ in reply["meta_info"]["output_token_logprobs"])
        assert reply["meta_info"]["weight_version"] == "2"
    assert {words[2] for words in told} == {wrong}
    assert {words[:2] for words in told} <= {(cluster.router.url, None), (cluster.router.url, cluster.engines[0].url)}
    assert len(told) == client.answers.rejected.total() <= 4


async def test_a_request_whose_answers_are_all_rejected_fails_with_the_reason(cluster, client):
    for engine in cluster.engines:
        engine.faults = FaultMix([(1.0, Failure(spoil="nan"))])
    with pytest.raises(HttpRequestError, match=r"an answer of http.* is rejected: token 3 of 4 has the log-prob None"):
        await client.post(f"{cluster.router.url}/generate", WITH_LOG_PROBS)
    assert len(cluster.requests) == MOST_REJECTED
    # Who wants no log-probs, and asks for many prompts at once, judges answers alone.
    await client.post(f"{cluster.router.url}/generate", REQUEST)


async def test_an_engine_at_a_port_that_begins_with_the_routers_is_distinguished(client, monkeypatch):
    router, engine = "http://127.0.0.1:3000", "http://127.0.0.1:30001"
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 1, "output_token_logprobs": [[None, 5, None]]}

    async def exchange(method, url, *_):
        return {"meta_info": meta}, SimpleNamespace(headers={})

    async def list_workers(*_):
        return [engine]

    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.0)
    monkeypatch.setattr(client, "_exchange", exchange)
    monkeypatch.setattr(client, "list_workers", list_workers)
    with pytest.raises(HttpRequestError, match="is rejected"):
        await client.post(f"{router}/generate", WITH_LOG_PROBS)
    # Once an answer is of the engine, the next one is asked of the router again: it has no other.
    assert client.answers.rejected == {router: MOST_REJECTED // 2, engine: MOST_REJECTED // 2}


async def test_a_newer_version_than_the_oldest_is_right(cluster, client):
    client.answers.oldest_version[cluster.engines[0].url] = 9
    cluster.engines[0].weight_version = "10"
    reply = await client.post(f"{cluster.engines[0].url}/generate", WITH_LOG_PROBS)
    assert reply["meta_info"]["weight_version"] == "10"


async def test_ranks_of_an_engine_are_one_engine(client, monkeypatch):
    workers = [{"url": f"http://e:{port}@{rank}", "worker_type": "regular"} for port in (1, 2) for rank in (0, 1)]
    workers.append({"url": "http://[::1]:3", "worker_type": "decode"})

    async def get(url, **_):
        return {"workers": workers}

    monkeypatch.setattr(client, "get", get)
    assert await client.list_workers("http://r") == ["http://e:1", "http://e:2", "http://[::1]:3"]
    assert await client.list_workers("http://r", "regular") == ["http://e:1", "http://e:2"]


async def test_smg_without_an_engine_is_asked_until_it_has_one(cluster, client):
    body = b'{"error":{"code":"model_not_found","message":"No worker available for model \'unknown\'"}}'
    cluster.engines[0].failures.extend([Failure(404, body)] * 3)
    await client.post(f"{cluster.engines[0].url}/generate", REQUEST, max_retries=1)
    assert len(cluster.engines[0].requests) == 4


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"type":"Internal Server Error","code":"call_upstream_request_error","message":"error sending"}}',
        b'{"error":{"message":"Decode transfer failed for request rank=0 rid=\'5\' with exception ..."}}',
        b'{"error":{"message":"Prefill bootstrap failed for request rank=0 req.rid=\'5\' with exception ..."}}',
    ],
)
async def test_a_router_that_lost_its_engine_is_asked_again(cluster, client, body):
    cluster.engines[0].failures.append(Failure(500, body))
    await client.post(f"{cluster.engines[0].url}/generate", REQUEST)
    assert len(cluster.engines[0].requests) == 2


@pytest.mark.parametrize("failure", [Failure(cut=True), Failure(200, b'{"text": "hal')])
async def test_cut_connections_and_broken_json_are_retried(cluster, client, failure):
    cluster.engines[0].failures.extend([failure] * 2)
    reply = await client.post(f"{cluster.engines[0].url}/generate", REQUEST)
    assert "text" in reply
    assert len(cluster.engines[0].requests) == 3


async def test_attempts_run_out(cluster, client):
    cluster.engines[0].failures.extend([Failure(503, b"no workers")] * 9)
    with pytest.raises(HttpRequestError, match=r"answered 503 \(status 503, 3 attempts, .*no workers"):
        await client.post(f"{cluster.engines[0].url}/generate", REQUEST, max_retries=3)
    assert len(cluster.engines[0].requests) == 3


async def test_nothing_listens(client):
    with pytest.raises(HttpRequestError, match=r"ClientConnectorError.*status None, 2 attempts"):
        await client.post("http://127.0.0.1:9/generate", REQUEST, max_retries=2)
    with pytest.raises(HttpRequestError, match="not a valid HTTP URL"):
        await client.post("localhost/generate", REQUEST)


async def test_the_deadline_covers_everything_and_aborts_the_request(cluster, client):
    cluster.engines[0].delay = cluster.engines[1].delay = 60.0
    began = time.monotonic()
    with pytest.raises(HttpTimeoutError, match=r"deadline of 0\.3 s") as caught:
        await client.post(f"{cluster.router.url}/generate", REQUEST, timeout=0.3)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - began < 30
    await client.drain_aborts()
    rid = cluster.requests[0]["rid"]
    assert all({"rid": rid} in engine.aborts for engine in cluster.engines)


async def test_the_deadline_names_the_last_failure(cluster, client):
    cluster.engines[0].failures.extend([Failure(503, b"starting")] * 1000)
    with pytest.raises(HttpTimeoutError, match=r"the last failed attempt: answered 503.*starting"):
        await client.post(f"{cluster.engines[0].url}/generate", REQUEST, timeout=0.3, max_retries=10**6)


@pytest.mark.parametrize("own_rid", [None, "mine"])
async def test_cancelling_aborts_on_the_engines_behind_the_router(cluster, client, own_rid):
    for engine in cluster.engines:
        engine.delay = 5.0
    payload = REQUEST if own_rid is None else {**REQUEST, "rid": own_rid}
    task = asyncio.create_task(client.post(f"{cluster.router.url}/generate", payload))
    while not cluster.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.drain_aborts()
    rid = cluster.requests[0]["rid"]
    assert own_rid in (None, rid)
    assert [engine.aborts for engine in cluster.engines] == [[{"rid": rid}], [{"rid": rid}]]
    assert "rid" not in REQUEST
    cluster.wait_until(lambda: not any(e.running for e in cluster.engines), "the request gone")


async def test_a_request_is_aborted_on_engines_that_replaced_those_of_the_list(cluster, client):
    for engine in cluster.engines:
        engine.delay = 5.0
    task = asyncio.create_task(client.post(f"{cluster.router.url}/generate", REQUEST))
    while not cluster.requests:
        await asyncio.sleep(0.01)
    gone = f"http://127.0.0.1:{find_available_port(20_000)}"
    client._workers[cluster.router.url] = (time.monotonic() + 60, {gone: "regular"})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.drain_aborts()
    assert [engine.aborts for engine in cluster.engines] == [[{"rid": cluster.requests[0]["rid"]}]] * 2


async def test_after_a_retry_the_attempt_in_progress_is_aborted(cluster, client):
    engine = cluster.engines[0]
    engine.delay = 5.0
    engine.failures.append(Failure(503))
    task = asyncio.create_task(client.post(f"{engine.url}/generate", {**REQUEST, "rid": "x"}))
    while not engine.running:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.drain_aborts()
    assert [r["rid"] for r in engine.requests] == ["x", "x-2"]
    assert engine.aborts == [{"rid": "x-2"}]


async def test_cancelling_anything_but_one_generation_aborts_nothing(cluster, client):
    engine = cluster.engines[0]
    engine.delay = 5.0
    batches = [{"input_ids": [[1], [2]]}, {"input_ids": [1], "sampling_params": {"n": 2}}, {"text": ["a"]}, {}]
    tasks = [asyncio.create_task(client.post(f"{engine.url}/generate", batch)) for batch in batches]
    tasks.append(asyncio.create_task(client.post(f"{engine.url}/nothing", {"rid": "z"})))
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.drain_aborts()
    assert engine.aborts == []


async def test_aborts_of_other_loops_are_not_waited_for(client, monkeypatch):
    """A gateway of agents has a loop of its own, and a task can be awaited on its own loop only."""

    async def never_ends(base: str, rid: str) -> None:
        await asyncio.Event().wait()

    async def leave() -> None:
        client._abort_unless_left("http://nowhere", http_client._AttemptId(REQUEST))

    monkeypatch.setattr(client, "_abort", never_ends)
    other = ServerThread()
    other.call(leave())
    async with asyncio.timeout(60):
        await client.drain_aborts()
    other.stop()
    assert client._aborts == set()


def test_connections_end_with_their_event_loop(cluster):
    """As plain hooks use the client: each call is a loop of its own."""
    client, url = HttpClient(4), cluster.engines[0].url
    port = int(url.rpartition(":")[2])

    async def ask() -> asyncio.AbstractEventLoop:
        await client.get(f"{url}/model_info")
        await client.post(f"{url}/generate", REQUEST)
        return asyncio.get_running_loop()

    connections = []
    for _ in range(5):
        loop = asyncio.run(ask())
        open_ones = psutil.Process().net_connections("tcp")
        connections.append(sum(bool(one.raddr) and one.raddr.port == port for one in open_ones))
    assert connections == [0] * 5
    assert list(client._pools) == [loop]


async def test_a_turn_is_as_good_as_a_connection(cluster):
    small, engine = HttpClient(2), cluster.engines[0]
    held = small.turn()
    async with held, small.turn():
        assert held.locked()
        third = asyncio.create_task(held.acquire())
        await asyncio.sleep(0)
        assert not third.done()
    assert await third
    other = ServerThread()

    async def of_another_loop() -> bool:
        return small.turn() is held

    assert not other.call(of_another_loop())
    other.stop()
    await small.post(f"{engine.url}/generate", REQUEST)
    await small.close()


async def test_a_request_on_a_dying_engine_is_sent_again_through_the_router(cluster, client):
    for engine in cluster.engines:
        engine.delay = 0.1
    tasks = [asyncio.create_task(client.post(f"{cluster.router.url}/generate", REQUEST)) for _ in range(4)]
    while sum(len(e.running) for e in cluster.engines) < 4:
        await asyncio.sleep(0.01)
    await asyncio.get_running_loop().run_in_executor(None, cluster.kill_engine, 0)
    replies = await asyncio.gather(*tasks)
    assert len({reply["text"] for reply in replies}) == 1


async def test_connections_are_limited_and_reused(cluster):
    small = HttpClient(2)
    cluster.engines[0].delay = 0.01
    await asyncio.gather(*(small.post(f"{cluster.engines[0].url}/generate", REQUEST) for _ in range(8)))
    assert cluster.engines[0].max_running <= 2
    await small.close()


async def test_questions_and_aborts_do_not_wait_behind_answers(cluster):
    """All connections hold requests that take forever."""
    small, engine = HttpClient(2), cluster.engines[0]
    engine.delay = 600.0
    posts = [asyncio.create_task(small.post(f"{engine.url}/generate", REQUEST)) for _ in range(3)]
    while len(engine.running) < 2:
        await asyncio.sleep(0.001)
    load = await small.get(f"{engine.url}/v1/loads", timeout=60)
    assert load["loads"][0]["num_running_reqs"] == 2
    await small.post(f"{engine.url}/abort_request", {"abort_all": True}, timeout=60)
    for post in posts[:2]:
        assert (await post)["meta_info"]["finish_reason"]["type"] == "abort"
    posts[2].cancel()
    await asyncio.wait(posts)
    await small.close()


async def test_one_server_does_not_wait_for_another(cluster):
    """A tool is asked while every connection to an engine waits for an answer."""
    small, (engine, tool) = HttpClient(2), cluster.engines
    engine.delay = 600.0
    posts = [asyncio.create_task(small.post(f"{engine.url}/generate", REQUEST)) for _ in range(2)]
    while len(engine.running) < 2:
        await asyncio.sleep(0.001)
    assert "text" in await small.post(f"{tool.url}/generate", REQUEST, timeout=60)
    for post in posts:
        post.cancel()
    await asyncio.wait(posts)
    await small.close()


async def test_the_key_goes_to_the_router_and_its_engines_only(cluster):
    keyed = HttpClient(4, api_key="secret")
    keyed.trust(cluster.router.url)
    await keyed.list_workers(cluster.router.url)
    await keyed.post(f"{cluster.engines[0].url}/generate", REQUEST)
    assert cluster.engines[0].headers[-1]["Authorization"] == "Bearer secret"
    stranger = HttpClient(4, api_key="secret")
    await stranger.post(f"{cluster.engines[0].url}/generate", REQUEST, headers={"X-Extra": "1"})
    assert "Authorization" not in cluster.engines[0].headers[-1]
    assert cluster.engines[0].headers[-1]["X-Extra"] == "1"
    await keyed.close()
    await stranger.close()


async def test_engines_that_only_prefill_can_be_left_out(cluster, client, monkeypatch):
    prefill, decode = ({"url": f"http://{kind}:1", "worker_type": kind} for kind in ("prefill", "decode"))

    async def get(url, **_):
        return {"workers": [prefill, decode]}

    monkeypatch.setattr(client, "get", get)
    assert await client.list_workers("http://router:1") == ["http://prefill:1", "http://decode:1"]
    assert await client.list_workers("http://router:1", "regular", "decode") == ["http://decode:1"]


async def test_the_proxy_of_the_environment_is_ignored(cluster, client, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert await client.get(f"{cluster.engines[0].url}/model_info")


def engine_args(**fields):
    return run_args(**{"rollout_num_engines": None, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "engines"),
    [({}, 4), ({"rollout_num_engines": 3}, 3), ({"rollout_num_gpus": 0}, 0), ({"rollout_num_gpus": None}, 0),
     ({"rollout_num_gpus": 1}, 1), ({"rollout_num_engines": 0}, 0)],
)  # fmt: skip
def test_number_of_engines(fields, engines):
    assert http_utils.get_rollout_num_engines(engine_args(**fields)) == engines


def test_the_process_client_is_sized_by_the_engines(monkeypatch):
    monkeypatch.setattr(http_utils, "_http_client", None)
    http_utils.init_http_client(engine_args(rollout_num_gpus=0))
    assert http_utils._http_client is None
    http_utils.init_http_client(engine_args(sglang_server_concurrency=10, rollout_request_timeout=7.0))
    assert http_utils._http_client.concurrency == 40
    assert http_utils._http_client.request_timeout == 7.0


async def test_module_functions(cluster, monkeypatch):
    monkeypatch.setattr(http_utils, "_http_client", None)
    assert (await http_utils.get(f"{cluster.engines[0].url}/model_info"))["tp_size"] == 1
    assert "text" in await http_utils.post(f"{cluster.router.url}/generate", REQUEST)
    await http_utils.get_http_client().close()
