"""NIXL and mooncake over TCP, from this process into the memory of others."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import xxhash

from slime.weights.p2p.agents import Agent, TransferError, Write, make_agent
from tests.support.fake_fleet import wait_until

pytestmark = pytest.mark.slow

BYTES = 4 << 20


class Target:
    """Another process, and its memory."""

    def __init__(self, backend: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.written_to", backend, str(BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.start = "", 0

    def wait_ready(self) -> None:
        self.address, self.start = json.loads(self.read("READY "))

    def read(self, begin: str) -> str:
        """Return the rest of the next line that begins so: packages print there, too."""
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if line.startswith(begin)).removeprefix(begin).strip()

    def checksum(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read("SUM ")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture
def targets(backend: str) -> Iterator[list[Target]]:
    started = [Target(backend) for _ in range(2)]
    try:
        for target in started:
            target.wait_ready()
        yield started
    finally:
        for target in started:
            target.end()


class Source:
    """Random bytes of this process."""

    def __init__(self, backend: str, seed: int) -> None:
        self.memory = ctypes.create_string_buffer(random.Random(seed).randbytes(BYTES), BYTES)
        self.agent: Agent = make_agent(backend)
        self.agent.register([(ctypes.addressof(self.memory), BYTES)], self.memory)

    def blocks(self, target: Target) -> list[Write]:
        """Blocks of different sizes, in no order, that cover everything."""
        draw, start = random.Random(target.start), ctypes.addressof(self.memory)
        cuts = [0, *sorted(draw.sample(range(1, BYTES), 99)), BYTES]
        blocks = [Write(start + a, target.start + a, b - a) for a, b in itertools.pairwise(cuts)]
        draw.shuffle(blocks)
        return blocks

    def write(self, targets: list[Target], deadline_s: float) -> None:
        peers = {self.agent.connect(target.address): self.blocks(target) for target in targets}
        self.agent.write(peers, deadline_s)


def test_blocks_arrive_in_two_processes_from_two_agents(backend: str, targets: list[Target]) -> None:
    for seed in (0, 1):
        source = Source(backend, seed)
        source.write(targets, 120.0)
        assert {target.checksum() for target in targets} == {xxhash.xxh3_128_hexdigest(source.memory)}
        source.agent.close()


def forgotten(backend: str, memory: weakref.ref[object]) -> bool:
    """Make another agent, which forgets those that were closed; return True if ``memory`` is no longer kept."""
    make_agent(backend).close()
    gc.collect()
    return memory() is None


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_is_named_and_another_agent_continues(
    backend: str, targets: list[Target], signum: signal.Signals
) -> None:
    first, lost = targets
    source = Source(backend, 0)
    source.write(targets, 120.0)
    os.kill(lost.process.pid, signum)
    os.waitid(os.P_PID, lost.process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # until then a write may get through
    peers = {source.agent.connect(t.address): source.blocks(t) for t in targets}
    with pytest.raises(TransferError) as raised:
        source.agent.write(peers, 5.0 if signum == signal.SIGSTOP else 120.0)
    reasons = raised.value.reasons
    name = list(peers)[1]
    assert name in reasons
    assert (reasons[name] is None) == (signum == signal.SIGSTOP)
    source.agent.close()
    again = Source(backend, 1)
    again.write([first], 120.0)
    assert first.checksum() == xxhash.xxh3_128_hexdigest(again.memory)
    again.agent.close()


def test_what_is_written_to_a_stopped_process_is_read_until_it_continues(backend: str, targets: list[Target]) -> None:
    first, stopped = targets
    source = Source(backend, 0)
    source.write(targets, 120.0)
    memory, content = weakref.ref(source.memory), random.Random(1).randbytes(BYTES)
    source.memory[:] = content
    os.kill(stopped.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TransferError):
        source.write(targets, 2.0)
    source.agent.close()
    del source
    gc.collect()
    assert memory() is not None
    os.kill(stopped.process.pid, signal.SIGCONT)
    expected = xxhash.xxh3_128_hexdigest(content)
    wait_until(lambda: stopped.checksum() == expected)
    wait_until(lambda: forgotten(backend, memory))
    assert first.checksum() == expected


def test_a_process_that_had_an_agent_ends_as_others_do(backend: str) -> None:
    program = f"from slime.weights.p2p.agents import make_agent; make_agent({backend!r}).close()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
