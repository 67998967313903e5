"""The buffer's HTTP side: what it refuses, whom it lets in, and what it says of its generator."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests

from slime.servers.key_file import shared_key
from slime_plugins.rollout_buffer.buffer import is_loopback
from slime_plugins.rollout_buffer.generators import find_generators
from tests.support.rollout_buffers import ServedBuffer
from tests.unit.slime_plugins.test_group_queue import item

pytestmark = pytest.mark.slow

OTHERS = (
    "tests.unit.slime_plugins.bad_generators", "tests.unit.slime_plugins.idle_generator",
    "tests.unit.slime_plugins.posting_generator",
)  # fmt: skip


@pytest.fixture
def served():
    with ServedBuffer(*OTHERS, max_items=3) as running:
        yield running


def post(url: str, body, headers=None) -> requests.Response:
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    given = {"Authorization": f"Bearer {shared_key()}", "Content-Type": "application/json"}
    return requests.post(url, data=data, timeout=30, headers=given if headers is None else {**given, **headers})


def get(url: str) -> requests.Response:
    return requests.get(url, headers={"Authorization": f"Bearer {shared_key()}"}, timeout=30)


def fetch(url: str, **asked) -> dict:
    return post(f"{url}/get_rollout_data", asked).json()


def test_what_is_written_is_fetched_once(served):
    assert fetch(served.url) == {
        "success": False,
        "message": "no rollout was started and nothing written",
        "data": {"data": [], "meta_info": {"generator": {"state": "none"}}},
    }
    assert post(f"{served.url}/buffer/write", item("1")).json()["success"]
    reply = fetch(served.url)
    assert reply["success"]
    assert reply["data"]["data"] == [item("1")]
    reply = fetch(served.url)
    assert (reply["success"], reply["data"]["data"]) == (False, [])


@pytest.mark.parametrize("path", ["/buffer/write", "/get_rollout_data", "/start_rollout"])
@pytest.mark.parametrize("body", [b"", b"{", b"\x80\x04\x95", b"[1, 2]", b'"x"', b"nan"])
def test_bodies_that_cannot_be_read_are_refused(served, path, body):
    reply = post(f"{served.url}{path}", body)
    assert reply.status_code == 400
    assert "JSON" in reply.json()["message"] or "expected an object" in reply.json()["message"]
    assert get(f"{served.url}/healthz").json()["ok"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/buffer/write", {"uid": "1"}, "missing: instance_id, messages, reward, extra_info"),
        ("/start_rollout", {"task_type": "chess", "num_repeat_per_sample": 1}, "'idle', 'math', 'posts'], got 'chess'"),
        ("/start_rollout", {"num_repeat_per_sample": 1}, "task_type must be"),
        ("/start_rollout", {"task_type": "math", "num_repeat_per_sample": 0}, "num_repeat_per_sample must be"),
        ("/start_rollout", {"task_type": "math"}, "num_repeat_per_sample must be"),
        ("/get_rollout_data", {"wait_s": "long"}, "wait_s and acknowledged must be numbers"),
        ("/get_rollout_data", {"acknowledged": "1"}, "wait_s and acknowledged must be numbers"),
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_say_what_was_expected(served, path, body, message):
    reply = post(f"{served.url}{path}", body)
    assert (reply.status_code, message in reply.json()["message"]) == (400, True)


def test_what_is_too_much_is_refused(served):
    assert post(f"{served.url}/buffer/write", b" " * (2 << 20)).status_code == 413
    for uid in ("1", "2", "3"):
        assert post(f"{served.url}/buffer/write", item(uid)).status_code == 200
    reply = post(f"{served.url}/buffer/write", item("4"))
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
    assert get(f"{served.url}/buffer/write").status_code == 405
    assert get(f"{served.url}/../etc/passwd").status_code == 404


def test_a_key_keeps_others_out():
    with ServedBuffer(key="secret") as served:
        url = f"{served.url}/buffer/write"
        assert requests.post(url, json=item("1"), timeout=30).status_code == 401
        assert post(url, item("1"), headers={"Authorization": "Bearer no"}).status_code == 401
        assert requests.get(f"{served.url}/buffer/write", timeout=30).status_code == 401
        assert requests.get(f"{served.url}/healthz", timeout=30).json() == {"ok": True}
        assert post(url, item("1"), headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_reader_waits_for_the_generators_end_and_hears_why(served):
    started = post(f"{served.url}/start_rollout", {"task_type": "breaks", "num_repeat_per_sample": 2})
    assert started.json() == {"message": "Rollout started", "dropped_items": 0}
    reply = fetch(served.url, wait_s=60)
    generator = reply["data"]["meta_info"]["generator"]
    assert (reply["success"], generator["state"], generator["exit_code"]) == (False, "failed", 3)
    assert "nothing works here" in generator["log"]
    post(f"{served.url}/buffer/write", item("1"))
    again = post(f"{served.url}/start_rollout", {"task_type": "breaks", "num_repeat_per_sample": 2})
    assert again.json()["dropped_items"] == 1


def test_a_generator_that_posts_by_itself_needs_to_know_of_no_key(served):
    start = {"task_type": "posts", "num_repeat_per_sample": 2, "remote_buffer_url": served.url}
    assert post(f"{served.url}/start_rollout", start).status_code == 200
    reply = fetch(served.url, wait_s=60)
    if not reply["success"]:  # the end of the generator was the news
        reply = fetch(served.url)
    assert [one["uid"] for one in reply["data"]["data"]] == ["requests", "urllib"], reply


def test_generators_are_found_by_their_type():
    assert set(find_generators([])) == {"math", "external"}
    with pytest.raises(ValueError, match="the generator json has no TASK_TYPE and no run_rollout"):
        find_generators(["json"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.7", False), ("box", False)],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "set SLIME_ROLLOUT_BUFFER_KEY"),
        (["--generator", "no.such.module"], "--generator: No module named 'no'"),
    ],
)
def test_mistakes_of_its_command_line(words, message):
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer", *words]
    environment = {"PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_generator_ends_with_its_buffer(served):
    started = post(f"{served.url}/start_rollout", {"task_type": "idle", "num_repeat_per_sample": 1})
    assert started.status_code == 200
    generator = served.buffer.generator
    pid = generator._process.pid
    assert psutil.Process(pid).is_running()
    served.server.call(served.buffer.stop())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not generator.log.exists()


def test_a_trajectory_that_is_half_sent_does_not_hold_a_buffer_that_ends():
    served = ServedBuffer("tests.unit.slime_plugins.half_sent_generator", shutdown_timeout=3600.0)
    with served:
        body = {"task_type": "half_sent", "num_repeat_per_sample": 1, "remote_buffer_url": served.url}
        assert post(f"{served.url}/start_rollout", body).status_code == 200
        log = served.buffer.generator.log
        deadline = time.monotonic() + 60
        while b"100 Continue" not in log.read_bytes():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


def generators_at_work() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]


def test_of_two_starts_at_once_one_generator_is_left(served):
    """A client whose connection broke asks again, while its first request is still at work."""
    before = set(generators_at_work())
    body = {"task_type": "idle", "num_repeat_per_sample": 1}
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: post(f"{served.url}/start_rollout", body).status_code, range(4)))
    assert replies == [200] * 4
    assert set(generators_at_work()) - before == {served.buffer.generator._process.pid}
    served.server.call(served.buffer.stop())
    assert set(generators_at_work()) == before


def test_a_generator_ends_with_a_buffer_that_is_killed():
    """Its trajectories would go to whatever buffer is started next at that address."""
    program = (
        "import asyncio; from slime_plugins.rollout_buffer.buffer import RolloutBuffer; "
        "from slime_plugins.rollout_buffer.generators import find_generators; "
        f"buffer = RolloutBuffer(find_generators([{OTHERS[1]!r}])); "
        "start = buffer.start_rollout({'task_type': 'idle', 'num_repeat_per_sample': 1}); "
        "loop = asyncio.new_event_loop(); loop.run_until_complete(start); "
        "print(buffer.generator._process.pid, flush=True); loop.run_forever()"
    )
    buffer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert buffer.stdout is not None
    generator = psutil.Process(int(buffer.stdout.readline()))
    buffer.kill()
    buffer.wait(60)
    buffer.stdout.close()
    try:
        generator.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            generator.kill()
