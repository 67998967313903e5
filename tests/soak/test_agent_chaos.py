"""Client, engine or gateway killed at fifty moments each: nothing is left running, no turn is half recorded, no handle
is left, and sessions work afterwards.

The gateway is its command. Its clients are processes, and so is the engine: a real one behind the router, except where
it is killed itself.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from slime.servers.key_file import shared_key
from slime.servers.loads import num_requests_from_load
from slime.utils.network import find_available_port
from tests.support.engines import engine_and_router, engine_args
from tests.support.rollout_buffers import ServedBuffer
from tools.tiny_model import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
COUNT, SEED = 50, 7
TOKENS = 32
"""Of every turn: nothing ends one before."""
ASKED = {"max_new_tokens": TOKENS, "ignore_eos": True}
PATIENCE_S = 300.0
CLIENT = """
import http.client, json, sys
port, sid, stream = sys.argv[1:]
body = {"messages": [{"role": "user", "content": "1+1="}, {"role": "user", "content": "and?"}], "stream": stream == "1"}
connection = http.client.HTTPConnection("127.0.0.1", int(port))
connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": "Bearer " + sid})
print("sent", flush=True)
connection.getresponse().read()
"""

pytestmark = pytest.mark.timeout(1800)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).status_code == 200
    except requests.RequestException:
        return False


class GatewayProcess:
    """``python -m slime.agent.serve``; answers are never given up, so that every token is in a sample."""

    def __init__(self, engine: str, sink: str, checkpoint: Path, log: Path) -> None:
        self.port = find_available_port(20_000)
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["--engine", engine, "--sink", sink, "--hf-checkpoint", str(checkpoint), "--port", str(self.port)]
        self.command = [sys.executable, "-m", "slime.agent.serve", *words, "--fork-threshold-tokens", "0"]
        self.log = log

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)
        try:
            until(lambda: answers(f"{self.url}/healthz"), "the gateway answers")
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def end(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)
        self.process.wait(PATIENCE_S)

    def handles(self) -> tuple[int, int]:
        """Open files and threads."""
        at = Path(f"/proc/{self.process.pid}")
        return len(os.listdir(at / "fd")), len(os.listdir(at / "task"))

    def post(self, path: str, sid: str = "", **body: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {sid or shared_key()}"}
        return requests.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S * 3)

    def open(self, instance: str) -> str:
        found = self.post("/sessions", instance_id=instance, sampling_params=ASKED)
        return str(found.json()["session_id"])

    def turn(self, sid: str, *said: str) -> requests.Response:
        return self.post("/v1/chat/completions", sid, messages=[{"role": "user", "content": text} for text in said])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("chaos") / "model")


@pytest.fixture(scope="module")
def real(checkpoint: Path) -> Iterator[SimpleNamespace]:
    """An engine behind the router: its URL, and how many requests run on it."""
    args, root = engine_args(checkpoint, engine_ready_timeout=600.0), checkpoint.parent
    with engine_and_router(args, root) as (engine, router):
        router.add_engine(engine.info)
        client = engine.client()
        yield SimpleNamespace(url=router.url, running=lambda: num_requests_from_load(client.loads()))


@pytest.fixture
def buffer() -> Iterator[ServedBuffer]:
    with ServedBuffer() as one:
        yield one


def test_clients_that_are_killed(real, buffer, checkpoint, tmp_path):
    rng = random.Random(SEED)
    gateway = GatewayProcess(real.url, buffer.url, checkpoint, tmp_path / "gateway.log")
    gateway.start()
    try:
        before, cut_off = (0, 0), 0
        for number in range(COUNT):
            sid = gateway.open(f"task-{number}")
            began = time.monotonic()
            assert gateway.turn(sid, "1+1=").status_code == 200
            seconds = time.monotonic() - began
            words = [str(gateway.port), sid, str(number % 2)]
            client = subprocess.Popen([sys.executable, "-SE", "-c", CLIENT, *words], stdout=subprocess.PIPE)
            assert client.stdout is not None
            assert client.stdout.readline() == b"sent\n"
            time.sleep(rng.random() * seconds)
            client.kill()
            client.wait(PATIENCE_S)
            client.stdout.close()
            assert gateway.turn(sid, "1+1=", "and then?").status_code == 200
            done = gateway.post(f"/sessions/{sid}/finish", reward=1.0).json()
            turns, rest = divmod(done["trained_tokens"], TOKENS)
            assert (turns in (2, 3), rest) == (True, 0), done
            cut_off += turns == 2
            if number == 4:
                before = gateway.handles()
        assert cut_off > COUNT // 4
        until(lambda: real.running() == 0, "no request runs")
        until(
            lambda: all(now <= then for now, then in zip(gateway.handles(), before, strict=True)), "no handle is left"
        )
        print(f"{cut_off} of {COUNT} turns were cut off; {before} open files and threads")
    finally:
        gateway.end(signal.SIGTERM)


def test_gateways_that_are_killed(real, buffer, checkpoint, tmp_path):
    rng = random.Random(SEED)
    gateway = GatewayProcess(real.url, buffer.url, checkpoint, tmp_path / "gateway.log")

    def session(number: int) -> bool:
        """Return True if it was written, as far as its client knows."""
        try:
            sid = gateway.open(f"task-{number}")
            for turn in range(3):
                gateway.turn(sid, *["1+1="] * (turn + 1)).raise_for_status()
            return gateway.post(f"/sessions/{sid}/finish", reward=1.0).status_code == 200
        except requests.RequestException:
            return False

    known, cut_off, seconds = 0, 0, 1.0
    with ThreadPoolExecutor(1) as pool:
        for number in range(COUNT):
            gateway.start()
            began = time.monotonic()
            known += session(2 * number)  # it works again
            seconds = time.monotonic() - began
            running = pool.submit(session, 2 * number + 1)
            time.sleep(rng.random() * seconds)
            gateway.end(signal.SIGKILL)
            finished = running.result(PATIENCE_S * 3)
            known += finished
            cut_off += not finished
            until(lambda: real.running() == 0, "no request of a gateway that is dead runs")
    assert cut_off > COUNT // 2
    items = buffer.buffer.queue.read()[0]
    assert known <= len(items) <= known + cut_off
    assert len({item["uid"] for item in items}) == len(items)
    for item in items:  # whole
        assert [sum(sample["loss_mask"]) for sample in item["samples"]] == [TOKENS] * 3
        assert all(len(sample["rollout_log_probs"]) == sample["response_length"] for sample in item["samples"])
    print(f"{cut_off} of {COUNT} sessions were cut off; {len(items)} are in the buffer, {known} by what clients know")


def test_engines_that_are_killed(buffer, checkpoint, tmp_path):
    """The engine is a stand-in that takes a tenth of a second for a turn, and is started again at the same address."""
    rng = random.Random(SEED)
    port = find_available_port(21_000)
    words = ["--port", port, "--tokens", TOKENS, "--mean-seconds", 0.1, "--sigma", 0.3]
    command = [sys.executable, "-m", "tests.support.standin", *map(str, words)]
    url = f"http://127.0.0.1:{port}"

    engines: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        engines.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
        until(lambda: answers(f"{url}/health"), "the engine answers")

    def kill() -> None:
        engines[-1].kill()
        engines[-1].wait(PATIENCE_S)

    def running() -> int:
        return int(requests.get(f"{url}/v1/loads", timeout=30).json()["loads"][0]["num_running_reqs"])

    gateway = GatewayProcess(url, buffer.url, checkpoint, tmp_path / "gateway.log")
    gateway.start()
    try:
        start()
        handles, hit = (0, 0), 0
        with ThreadPoolExecutor(4) as pool:
            for number in range(COUNT):
                sid = gateway.open(f"task-{number}")
                turns = [pool.submit(gateway.turn, sid, f"agent {agent}") for agent in range(4)]
                time.sleep(rng.random() * 0.15)
                hit += not all(turn.done() for turn in turns)
                kill()
                start()
                statuses = [turn.result(PATIENCE_S * 3).status_code for turn in turns]
                assert set(statuses) <= {200, 502}
                statuses.append(gateway.turn(sid, "agent 4").status_code)
                assert statuses[-1] == 200
                done = gateway.post(f"/sessions/{sid}/finish", reward=1.0).json()
                assert (done["samples"], done["trained_tokens"]) == (statuses.count(200), statuses.count(200) * TOKENS)
                if number == 4:
                    handles = gateway.handles()
        until(lambda: running() == 0, "no request runs")
        until(
            lambda: all(now <= then for now, then in zip(gateway.handles(), handles, strict=True)), "no handle is left"
        )
    finally:
        gateway.end(signal.SIGTERM)
        kill()
