"""Reward workers: the same results as in this process, and nothing a reward does reaches this process."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slime.algorithms.reward_types import REWARD_TYPES
from slime.rollout.rm_hub import async_rm, extract_boxed_answer, rules
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import RewardFailure
from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits, default_worker_count, get_reward_workers
from slime.utils.types import Sample
from tests.support.arguments import run_args

BAD = "tests.support.bad_rewards"
CPU_S = 0.25


def test_rewards_in_workers_know_where_the_models_are() -> None:
    """A reward function that calls a judge needs its address in the worker process too."""
    args = run_args(sglang_router_ip="10.0.0.1", sglang_router_port=5)
    args.sglang_model_routers = {"actor": ("10.0.0.1", 5), "judge": ("10.0.0.1", 7)}
    workers = get_reward_workers(args)
    path = "slime.rollout.requests.engines.model_url"
    assert workers.submit(path, args, "judge", "/generate").result(60) == "http://10.0.0.1:7/generate"
    with pytest.raises(RewardFailure, match="no model 'juge' is served"):
        workers.submit(path, args, "juge", "/generate").result(60)


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(1, WorkerLimits(cpu_s=CPU_S, memory_bytes=1 << 30))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(2, WorkerLimits(cpu_s=60.0))
    yield pool
    pool.close()


PIECES = (
    "\\boxed{", "\\fbox{", "}", "{", "</think>", "###Response", "Answer:", "\n", " ", "(", ")", ",", "\\frac", "\\sqrt",
    "1", "2", "34", "0.5", "x", "y", "=", "+", "^", "\\text{", "A", "B", "the answer is ", "yes", "no", "a ", "\\pi",
    "blue", "é", "\ud800", "$", "%", "/", "-",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
LABELS = TEXTS | st.none() | st.integers(-50, 50) | st.floats(-5, 5).map(lambda x: round(x, 2))
METADATA = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(TEXTS, min_size=1, max_size=5), "correct_letter": st.sampled_from("ABCDZ")}
)


def outcome(compute):
    """Return the result of a call, or the text of its exception."""
    try:
        return compute()
    except RewardFailure as e:
        return str(e).removeprefix(f"{rules.PATH}: ")
    except Exception as e:  # noqa: BLE001  (whatever a rule raises, the worker must say the same)
        return f"{type(e).__name__}: {e}"


OWN_RULES = sorted(kind.name for kind in REWARD_TYPES.values() if kind.rule and kind.module is None)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(OWN_RULES), boxed=st.booleans(), response=TEXTS, label=LABELS, metadata=METADATA)
@example(kind="math", boxed=False, response=r"\boxed{(x+1)^2}", label="x^2+2x+1", metadata={})
@example(kind="math", boxed=False, response=r"\boxed{2\sqrt{3}}", label=r"\sqrt{12}", metadata={})
def test_a_worker_and_this_process_agree(kind, boxed, response, label, metadata):
    args = run_args(rm_type=f"boxed_{kind}" if boxed else kind, reward_workers=1)
    sample = Sample(response=response, label=label, metadata={**metadata, "unrelated": threading.Lock()})
    graded = rules.as_response(kind, extract_boxed_answer(response) or "") if boxed else response
    here = outcome(lambda: rules.grade(kind, graded, label, metadata))
    there = outcome(lambda: asyncio.run(async_rm(args, sample)))
    assert here == there
    assert type(here) is type(there)


@pytest.mark.parametrize(
    "value", ["é\ud800\0", (1, [2.5, None]), np.float32(0.1), decimal.Decimal("0.1"), b"\n" * 300_000, "x" * 3_000_000]
)
async def test_arguments_of_any_kind_arrive(workers, value):
    assert await workers.call(f"{BAD}.describe", value) == f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize(
    "value", [1, 0.1, True, None, "é\ud800\0", {"score": -1.0, "pred": [2.5, None]}, "x" * 3_000_000]
)
async def test_results_are_returned_unchanged(workers, value):
    back = await workers.call(f"{BAD}.echo", value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        ("raises", (), "raised", "KeyError: 'no such answer'"),
        ("leaves", (), "raised", "SystemExit: 3"),
        ("vanishes", (), "crashed", "exit code 17"),
        ("breaks", (), "crashed", "exit code -11"),
        ("eats_memory", (), "memory", "MemoryError"),
        ("forks", (), "raised", "BlockingIOError"),
        ("starts_a_process", (), "raised", "BlockingIOError"),
        ("burn", (30.0,), "timeout", "took more than 0.25 s of CPU time (--reward-time-limit)"),
        ("loop_in_c", (), "timeout", "took more than 0.25 s of CPU time"),
        ("nap", (60.0,), "timeout", "took more than 1.5 s (6 x --reward-time-limit)"),
        ("sends_a_hostile_object", (), "raised", "the result cannot be sent back"),
        ("writes_to_the_owner", (), "crashed", "its worker sent an unreadable reply"),
        ("returns_what_cannot_be_pickled", (), "raised", "the result cannot be sent back"),
        ("echo", (threading.Lock(),), "raised", "the arguments cannot be sent"),
        ("no_such", (), "raised", "no attribute 'no_such'"),
    ],
)
async def test_what_a_reward_does_costs_one_job(workers, name, arguments, kind, message):
    with pytest.raises(RewardFailure) as caught:
        await workers.call(f"{BAD}.{name}", *arguments)
    assert caught.value.kind == kind
    assert f"{BAD}.{name}: " in str(caught.value)
    assert message in str(caught.value)
    if kind in ("timeout", "memory") or name in ("raises", "breaks"):
        assert f"in {name}" in caught.value.details  # the stack, also where Python was not asked
    assert await workers.call(f"{BAD}.echo", 7) == 7


async def test_threads_and_prints_are_fine(workers):
    assert await workers.call(f"{BAD}.starts_a_thread") == 5
    assert await workers.call(f"{BAD}.prints", "noise\n" * 50_000) == "noise\n" * 50_000


async def test_a_worker_that_ignores_its_timers_is_killed(monkeypatch):
    monkeypatch.setattr("slime.rollout.rm_hub.workers.STOP_GRACE_S", 0.2)
    stubborn = RewardWorkers(1, WorkerLimits(cpu_s=0.05))
    with pytest.raises(RewardFailure, match="did not answer within") as caught:
        await stubborn.call(f"{BAD}.blocks_the_timers")
    assert caught.value.kind == "timeout"
    stubborn.close()


async def test_workers_are_started_before_they_are_needed_and_again_when_one_dies(patient):
    deadline = time.monotonic() + 60
    while len(patient.pids()) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    before = patient.pids()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(before[0]).wait(10)
    found = {await patient.call(f"{BAD}.pid") for _ in range(8)}
    assert before[0] not in found


async def test_jobs_run_at_the_same_time_and_a_cancelled_one_costs_nothing(patient):
    await asyncio.gather(*(patient.call(f"{BAD}.echo", 1) for _ in range(2)))
    began = time.monotonic()
    running = [asyncio.ensure_future(patient.call(f"{BAD}.nap", 0.5)) for _ in range(2)]
    waiting = [asyncio.ensure_future(patient.call(f"{BAD}.nap", 60.0)) for _ in range(20)]
    await asyncio.sleep(0.1)
    before = patient.pids()
    for task in waiting:
        task.cancel()
    assert await asyncio.gather(*running) == [1.0, 1.0]
    assert await patient.call(f"{BAD}.echo", 2) == 2
    assert time.monotonic() - began < 10
    assert patient.pids() == before


async def test_the_loop_continues_while_a_reward_works(patient):
    ticks = 0
    job = asyncio.ensure_future(patient.call(f"{BAD}.burn", 0.3))
    while not job.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert await job == 1.0
    assert ticks >= 10


async def test_a_hanging_reward_costs_its_sample_in_a_rollout(workers):
    async def hang_on_two(args, sample):
        return await workers.call(f"{BAD}.burn", 30.0 if sample.index == 2 else 0.0)

    errors = RewardErrors()
    samples = [Sample(index=n) for n in range(4)]
    args = run_args(rm_type="math")
    await asyncio.gather(*(errors.score_one(args, sample, hang_on_two) for sample in samples))
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0, 1.0]
    assert [sample.remove_sample for sample in samples] == [False, False, True, False]
    assert errors.metrics()["rollout/reward/failures/timeout"] == 1


OWNER = """
import sys, time
from slime.rollout.rm_hub.workers import RewardWorkers
pool = RewardWorkers(2)
pool.submit("tests.support.bad_rewards.echo", 1).result()
while len(pool.pids()) < 2:
    time.sleep(0.01)
busy = pool.submit("tests.support.bad_rewards.loop_in_c")
time.sleep(0.1)
print(*pool.pids(), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_workers_end_with_their_owner(end):
    wait = "600" if end == "kill" else "0"
    with subprocess.Popen([sys.executable, "-c", OWNER, wait], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        found = [psutil.Process(int(word)) for word in owner.stdout.readline().split()]
        assert len(found) == 2
        if end == "kill":
            owner.kill()
        owner.wait(30)
        _, left = psutil.wait_procs(found, timeout=5)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_the_flags_choose_the_workers():
    one = run_args(reward_workers=1, reward_time_limit=7.0)
    pool = get_reward_workers(one)
    assert pool is get_reward_workers(one)
    assert pool.limits.cpu_s == 7.0
    assert pool.limits.wall_s == 42.0
    assert pool.submit(f"{BAD}.echo", 3).result(60) == 3
    assert len(pool.pids()) == 1
    pool.close()
    assert pool.pids() == []
    assert 1 <= default_worker_count() <= 8


def test_workers_of_a_large_process_are_kept():
    """A worker retires when it has had 1 GiB in memory itself; what its parent had at its start does not count."""
    ballast = bytearray(b"\1") * (1200 << 20)
    pool = RewardWorkers(1)
    try:
        assert pool.submit(f"{BAD}.echo", 1).result(60) == 1
        first = pool.pids()
        assert pool.submit(f"{BAD}.echo", 2).result(60) == 2
        assert len(first) == 1
        assert pool.pids() == first
    finally:
        pool.close()
        del ballast
