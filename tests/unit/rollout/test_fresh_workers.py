"""One answer leaves nothing behind for the next one, whether its rule is ours or that of other authors."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.algorithms.reward_types import REWARD_TYPES
from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.failure import JobEnded, RewardFailure
from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits

pytestmark = pytest.mark.slow

STATE: list[int] = []
SECRETS = {"WANDB_API_KEY": "one", "HF_TOKEN": "two", "AWS_SECRET_ACCESS_KEY": "three", "SLIME_ROLLOUT_BUFFER_KEY": "4"}


def remember(number: int) -> list[int]:
    STATE.append(number)
    return STATE


def variables() -> dict[str, str]:
    return dict(os.environ)


def end(code: int) -> None:
    os._exit(code)


def spin() -> None:
    while True:
        pass


def large() -> str:
    return "x" * (1 << 22)


def read(path: str) -> str:
    return Path(path).read_text()


@pytest.fixture(scope="module")
def fresh() -> Iterator[RewardWorkers]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        workers = RewardWorkers(1, WorkerLimits(cpu_s=1.0, memory_bytes=1 << 30, fresh=True))
        yield workers
        workers.close()


async def call(workers: RewardWorkers, name: str, *arguments: object) -> object:
    return await workers.call(f"{__name__}.{name}", *arguments)


async def test_every_job_begins_with_what_the_first_one_had(fresh):
    assert [await call(fresh, "remember", n) for n in (1, 2, 3)] == [[1], [2], [3]]


async def test_a_job_is_answered_however_its_process_ends_and_the_worker_stays(fresh):
    assert await call(fresh, "remember", 1) == [1]
    [pid] = fresh.pids()
    for code in (0, 3):
        with pytest.raises(JobEnded, match=f"exit code {code}"):
            await call(fresh, "end", code)
    with pytest.raises(RewardFailure, match="took more than 1 s of CPU time") as caught:
        await call(fresh, "spin")
    assert caught.value.kind == "timeout"
    assert "in spin" in caught.value.details
    assert await call(fresh, "large") == "x" * (1 << 22)
    assert fresh.pids() == [pid]


async def test_no_process_is_left(fresh):
    await asyncio.gather(*(call(fresh, "remember", n) for n in range(5)))
    [pid] = fresh.pids()
    assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""


async def test_jobs_have_no_environment_and_workers_no_secrets(fresh):
    assert await call(fresh, "variables") == {}
    [pid] = fresh.pids()
    names = {line.partition(b"=")[0].decode() for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
    assert not names & set(SECRETS)


async def test_workers_that_stay_get_no_secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    workers = RewardWorkers(1, WorkerLimits(cpu_s=5.0))
    found = await workers.call(f"{__name__}.variables")
    workers.close()
    assert not set(found) & set(SECRETS)
    assert "PATH" in found


async def test_rules_of_other_authors_are_graded_apart():
    graded = [kind for kind in REWARD_TYPES.values() if kind.rule]
    assert {kind.name for kind in graded} - set(OURS) == {kind.name for kind in graded if kind.fresh}


OURS = ("math", "math_verify", "deepscaler", "dapo", "f1", "gpqa")
ENDLESS = r"\boxed{9^{9^{9^9}}}"  # for math-verify, which only the limits of a worker end
ANSWERS = [
    r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{2^{10}}", r"\boxed{x^2+1}", r"\boxed{\sqrt{8}}", r"\boxed{1,000}",
    r"\boxed{(1,2)}", r"\boxed{\infty}", "no box", ENDLESS, r"\boxed{\text{a}}", "Answer: 7", "",
]  # fmt: skip


def test_our_rules_keep_nothing():
    """Each verdict is that of a first answer, whatever was graded before; and the interpreter's own state stays."""
    metadata = {"choices": ["1", "2"], "correct_letter": "A"}
    pairs = [(kind, answer, label) for kind in OURS for answer in ANSWERS for label in ("\\frac{1}{2}", "1024", "7")]
    pairs = [pair for pair in pairs if pair[:2] != ("math_verify", ENDLESS)]
    import decimal

    before = random.getstate(), decimal.getcontext().prec, dict(os.environ), os.getcwd()
    first = {pair: rules.grade(*pair, metadata) for pair in pairs}
    for seed in range(2):
        shuffled = list(pairs)
        random.Random(seed).shuffle(shuffled)
        assert {pair: rules.grade(*pair, metadata) for pair in shuffled} == first
    assert (random.getstate(), decimal.getcontext().prec, dict(os.environ), os.getcwd()) == before
