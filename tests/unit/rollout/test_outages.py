"""A prompt that always fails costs itself; a service that fails for all pauses generation, and at last ends the run."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import outages
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import AsyncRolloutWorker, generate_rollout_fully_async, stop_global_worker
from slime.rollout.groups import GroupJob
from slime.rollout.held_groups import HeldGroups
from slime.rollout.outages import LEAST, ServiceOutage, is_of_service
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.staleness import weight_clock
from slime.servers.http_client import HttpRequestError
from slime.utils.async_utils import run
from slime.utils.types import Sample, iter_samples
from tests.support.rollout_args import rollout_args
from tests.support.virtual_time import run_virtually

HERE = __name__
STARTED: Counter[Any] = Counter()
DOWN_FOR: list[int] = []
"""The number of calls that fail from now on, whatever they are about."""


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    STARTED.clear()
    DOWN_FOR.clear()
    monkeypatch.setattr(outages, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(outages, "LONGEST_PAUSE_S", 0.05)
    yield
    stop_global_worker()


def answered(sample: Sample) -> Sample:
    sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 1, [0.0]
    sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
    return sample


async def one_in_four_is_bad(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The second sample of every fourth prompt is given up, always."""
    STARTED[sample.group_index] += 1
    if sample.group_index % 4 == 1 and sample.index % 2 == 1:
        sample.status = Sample.Status.ABORTED
        sample.metadata = {**sample.metadata, "abort_reason": "no-sandbox", "abort_error": "no such image"}
        return sample
    await asyncio.sleep(0.001)
    return answered(sample)


async def bad_by_error(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    if sample.group_index % 4 == 1 and sample.index % 2 == 1:
        raise ConnectionRefusedError("search index of this prompt")
    await asyncio.sleep(0.001)
    return answered(sample)


async def down_for_a_while(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    await asyncio.sleep(0)
    if DOWN_FOR and DOWN_FOR[0] > 0:
        DOWN_FOR[0] -= 1
        raise ConnectionRefusedError("no judge at port 9")
    return answered(sample)


async def never(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    sample.status = Sample.Status.ABORTED
    return sample


ROLLOUTS = {"sync": generate_rollout, "partial": generate_rollout, "fully async": generate_rollout_fully_async}


def arguments(make_args: Any, kind: str, function: str, **changes: Any) -> tuple[Any, Any, Any]:
    args = make_args(
        prompts=400, custom_generate_function_path=f"{HERE}.{function}", partial_rollout=kind == "partial",
        sglang_server_concurrency=8, **changes,
    )  # fmt: skip
    return args, RolloutDataSourceWithBuffer(args), ROLLOUTS[kind]


@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize("function", ["one_in_four_is_bad", "bad_by_error"])
def test_a_prompt_that_always_fails_is_tried_three_times_and_costs_itself(make_args, kind, function, caplog):
    args, source, rollout = arguments(make_args, kind, function, rollout_batch_size=2)
    trained, given_up, counted = Counter(), [], Counter()
    for rollout_id in range(24):
        output = rollout(args, rollout_id, source)
        assert len(output.samples) == 2
        counted.update({name: value for name, value in output.metrics.items() if "given_up" in name})
        for group in output.samples:
            trained[group[0].group_index] += 1
            bad = [sample for sample in group if sample.status == Sample.Status.FAILED]
            given_up += [group] if bad else []
            assert len(group) == 2
            assert all(s.status == Sample.Status.COMPLETED and not s.remove_sample for s in group if s not in bad)
    stop_global_worker()
    begun = {number: count for number, count in STARTED.items() if number % 4 == 1}
    assert set(trained.values()) == {1}, "no prompt is consumed twice"
    ready = [group for group in source.buffer if any(s.status == Sample.Status.FAILED for s in iter_samples(group))]
    assert len(given_up) + len(ready) >= counted["rollout/given_up_groups"] >= len(given_up) > 1
    STARTED.clear()
    rollout(args, 24, source)
    assert not STARTED.keys() & {group[0].group_index for group in ready}, "what was given up is not tried again"
    stop_global_worker()
    assert {group[0].group_index % 4 for group in given_up} == {1}
    for group in given_up:
        (bad,) = (sample for sample in group if sample.index % 2 == 1)
        assert (bad.reward, bad.remove_sample, bad.response_length) == (0.0, True, 0)
        assert bad.metadata["failed_attempts"] == 3
        assert ("no such image" if function == "one_in_four_is_bad" else "search index") in bad.metadata["abort_error"]
        assert len(bad.tokens) > 0, "it has a place in a batch"
    assert max(begun.values()) <= 2 * (3 + 2), "three attempts of two samples each, and what ended with its rollout"
    assert caplog.text.count("is given up after 3 attempts (--max-prompt-attempts)") >= len(given_up)


@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_service_that_is_down_for_a_while_costs_no_prompt(make_args, kind, batch, caplog):
    args, source, rollout = arguments(make_args, kind, "down_for_a_while", rollout_batch_size=batch)
    rollout(args, 0, source)
    DOWN_FOR.append(40)
    outputs: list[Any] = []
    while len(outputs) < 4 or "answers again" not in caplog.text:  # what is ready was made before it went down
        assert len(outputs) < 50
        outputs.append(rollout(args, 1 + len(outputs), source))
    stop_global_worker()
    samples = [sample for output in outputs for sample in iter_samples(output.samples)]
    assert all(sample.reward == 1.0 and not sample.remove_sample for sample in samples)
    assert DOWN_FOR == [0]
    assert "rollout/given_up_groups" not in {name for output in outputs for name in output.metrics}
    assert caplog.text.count("fails for all, and generation pauses") == 1
    assert f"generate function {HERE}.down_for_a_while fails for all" in caplog.text
    assert caplog.text.count("answers again after") == 1
    assert "no judge at port 9" in caplog.text
    assert "test_outages.py" in caplog.text, "the line of the user's code"
    if kind != "fully async":
        assert max(STARTED.values()) <= 2 * 40


@pytest.mark.parametrize("kind", ROLLOUTS)
@pytest.mark.parametrize("batch", [1, 6])
def test_a_service_that_stays_down_ends_the_run_with_its_name(make_args, kind, batch, caplog):
    args, source, rollout = arguments(make_args, kind, "never", rollout_batch_size=batch, service_outage_timeout=0.2)
    with pytest.raises(ServiceOutage, match=rf"generate function {HERE}\.never has failed for all for .*0\.2\)"):
        rollout(args, 0, source)
    stop_global_worker()
    assert sum(STARTED.values()) < 2 * (2 * max(batch, LEAST, 8) + 12), "it is asked after growing waits"
    assert len(source.buffer) == source.sample_group_index, "nothing is lost"
    assert not any(sample.metadata for sample in iter_samples(source.buffer)), "it counts against no prompt"


def test_a_mistake_in_the_function_stops_the_run_at_once(make_args):
    args, source, rollout = arguments(make_args, "sync", "mistaken", rollout_batch_size=2)
    with pytest.raises(ZeroDivisionError):
        rollout(args, 0, source)
    assert max(STARTED.values()) <= 2


async def mistaken(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    sample.reward = 1 / 0
    return sample


def test_attempts_are_counted_across_a_restart(make_args, tmp_path):
    args, source, rollout = arguments(
        make_args, "sync", "one_in_four_is_bad", rollout_batch_size=4, over_sampling_batch_size=4,
        save=str(tmp_path / "s"), load=str(tmp_path / "s"), save_interval=1,
    )  # fmt: skip
    given_up: list[Sample] = []
    for rollout_id in range(4):
        output = rollout(args, rollout_id, source)
        given_up += [s for s in iter_samples(output.samples) if s.status == Sample.Status.FAILED]
        source.record_consumed(rollout_id, list(iter_samples(output.samples)))
        source.snapshot(rollout_id)
        source.save(rollout_id)
        source = RolloutDataSourceWithBuffer(args)  # each rollout in a process of its own
        source.load(rollout_id)
    assert [s.metadata["failed_attempts"] for s in given_up if s.group_index == 1] == [3]
    assert STARTED[1] == 2 * 3


# What a service that is down is asked with may say nothing of it


async def of_another_service(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return answered(sample)


async def that_fails_too(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    if STARTED[sample.group_index] <= 2:
        raise ConnectionRefusedError("another one")
    return answered(sample)


async def with_an_error(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.group_index] += 1
    if STARTED[sample.group_index] <= 2:
        raise KeyError("once")
    return answered(sample)


class Probing:
    """A data source whose groups need ``down_for_a_while``; while generation is paused, another function."""

    def __init__(self, args: Any, probe: Any) -> None:
        self.probe, self.numbers, self.back = probe, itertools.count(), []
        self.probes = 0
        self.worker = AsyncRolloutWorker(args, self)

    def get_samples(self, count: int) -> list[list[Sample]]:
        if self.back:
            return [self.back.pop()]
        number, paused = next(self.numbers), self.worker.is_paused
        self.probes += paused
        path = f"{HERE}.{self.probe if paused and self.probe != 'complete' else 'down_for_a_while'}"
        group = [
            Sample(group_index=number, index=2 * number + i, prompt="p", label="l", generate_function_path=path)
            for i in range(2)
        ]
        return [[answered(sample) for sample in group] if paused and self.probe == "complete" else group]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.back += groups


PROBES = ["of_another_service", "that_fails_too", "with_an_error", "complete"]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_that_says_nothing_of_the_service_is_followed_by_another(make_args, probe):
    args, *_ = arguments(make_args, "fully async", "unused", rollout_batch_size=2)
    source = Probing(args, probe)
    DOWN_FOR.append(80)
    output = run(asyncio.wait_for(source.worker.rollout(0), 20))
    source.worker.stop()
    assert source.probes
    assert all(sample.reward == 1.0 for sample in iter_samples(output.samples))


@pytest.mark.parametrize("probe", PROBES)
def test_a_service_that_stays_down_ends_the_run_whatever_else_answers(make_args, probe):
    args, *_ = arguments(make_args, "fully async", "unused", rollout_batch_size=40, service_outage_timeout=0.2)
    source = Probing(args, probe)
    DOWN_FOR.append(10**9)
    with pytest.raises(ServiceOutage, match="has failed for all"):
        run(asyncio.wait_for(source.worker.rollout(0), 20))
    source.worker.stop()
    assert source.probes


async def aborted_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.index] += 1
    await asyncio.sleep(0)
    if STARTED[sample.index] > 1:
        return answered(sample)
    sample.status = Sample.Status.ABORTED
    return sample


@pytest.mark.parametrize("mode", [{"weight_sync_pause_mode": "abort"}, {"rollout_external": True}])
def test_what_engines_abort_for_new_weights_counts_against_nothing(make_args, monkeypatch, caplog, mode):
    monkeypatch.setattr(weight_clock(), "step", 3)
    args, source, rollout = arguments(make_args, "fully async", "aborted_once", rollout_batch_size=4)
    vars(args).update(mode)
    output = rollout(args, 0, source)
    assert len(output.samples) == 4
    assert "fails for all" not in caplog.text
    assert not any("failed_attempts" in sample.metadata for sample in iter_samples(output.samples))
    stop_global_worker()
    args.custom_generate_function_path, args.service_outage_timeout = f"{HERE}.never", 0.2
    with pytest.raises(ServiceOutage):
        rollout(args, 1, RolloutDataSourceWithBuffer(args))  # the other one has finished groups


async def fails_late(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    STARTED[sample.index] += 1
    if sample.group_index == 3 and STARTED[sample.index] == 1:
        await asyncio.sleep(0.1)
        raise ConnectionRefusedError("no judge at port 9")
    return answered(sample)


def test_a_group_that_fails_after_the_data_source_has_ended_is_tried_again(make_args):
    args, *_ = arguments(make_args, "fully async", "fails_late", rollout_batch_size=4)
    groups = [[Sample(group_index=n, index=2 * n + i, prompt="p", label="l") for i in range(2)] for n in range(4)]
    worker = AsyncRolloutWorker(args, SimpleNamespace(get_samples=lambda count: [groups.pop(0)] if groups else []))
    output = run(asyncio.wait_for(worker.rollout(0), 20))
    assert len(output.samples) == 4
    worker.stop()


def test_a_group_that_was_finished_when_it_was_drawn_is_no_success_of_its_service(make_args, monkeypatch):
    args, source, _ = arguments(make_args, "fully async", "unused", rollout_batch_size=4)
    worker, successes = AsyncRolloutWorker(args, source), []
    monkeypatch.setattr(worker, "_answered", successes.append)

    async def generate(args: Any, job: GroupJob) -> Any:
        job.result = [answered(sample) for sample in job.group]
        return job.result

    async def scene() -> list[GroupJob]:
        worker._generate = generate
        jobs = [GroupJob([Sample(index=i) for i in range(2)]) for _ in range(2)]
        for sample in jobs[0].original:
            sample.status, sample.response_length, sample.tokens = Sample.Status.COMPLETED, 1, [1, 2]  # no reward yet
        await asyncio.gather(*(worker._begin(job) for job in jobs))
        await asyncio.sleep(0)
        return jobs

    assert successes == run(scene())[1:]
    assert len(worker.completed) == 2


# The rule, on random histories


class Stream(HeldGroups):
    """Groups of which the world decides whether they fail; one attempt takes a second or more."""

    def __init__(self, args: Any, rng: random.Random, groups: int = 40, services: int = 1) -> None:
        super().__init__(args)
        self.rng, self.failure = rng, None
        self.bad: set[int] = set()
        self.down: set[str] = set()
        self.attempts: Counter[int] = Counter()
        self.fair: Counter[int] = Counter()
        self.asked: list[float] = []
        self.kept: dict[int, bool] = {}
        self.back: list[Any] = []
        paths = [f"service {number % services}" for number in range(groups)]
        self.new = [
            GroupJob([Sample(group_index=number, index=number, generate_function_path=path)])
            for number, path in enumerate(paths)
        ]

    def start(self, job: Any) -> None:
        task = asyncio.ensure_future(self.attempt(job))
        self.in_flight[task] = job

    _try_to_begin = start

    async def attempt(self, job: Any) -> None:
        number = job.original[0].group_index
        self.attempts[number] += 1
        self.asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.rng.choice([0.001, 1.0, 5.0]))
        self.in_flight.pop(asyncio.current_task())
        is_down = self._service(job) in self.down
        if is_down or number in self.bad:
            self.fair[number] += not is_down
            self._hold(job, "refused")
        else:
            self._answered(job)
            self._keep(job)
        self._probe_is_lost(job)

    def _may_begin(self) -> bool:
        return bool(self.waiting or self.back or self.new)

    def _next_job(self) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        jobs = self.back or self.new
        return jobs.pop(0) if jobs else None

    def _keep(self, job: Any) -> None:
        number = job.original[0].group_index
        assert number not in self.kept
        self.kept[number] = not any(sample.status == Sample.Status.FAILED for sample in job.result)

    def _to_begin_again(self, job: Any) -> Any:
        return job.original

    def _hand_back(self, job: Any, group: Any) -> None:
        self.back.append(job)

    def stop_with(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _notice(self) -> None: ...


async def history(seed: int, services: int) -> Stream:
    """Run 40 groups, some of them bad, with outages; return the stream when all are kept or it has failed."""
    rng = random.Random(seed)
    args = rollout_args(max_prompt_attempts=rng.choice([1, 2, 3, 5]), service_outage_timeout=1e5)
    stream = Stream(args, rng, services=services)
    stream.bad = {n for n in range(40) if rng.random() < rng.choice([0.0, 0.25, 0.5])} - {38, 39}
    wide = rng.choice([1, 2, 5, 20])
    for step in range(10_000):
        if step % 50 == 0:
            names = [f"service {number}" for number in range(services)]
            stream.down = {name for name in names if rng.random() < 0.3 and step < 3000}
        while stream.failure is None and not stream.is_paused and len(stream.in_flight) < wide:
            if (job := stream._next_job()) is not None:
                stream.start(job)
            elif stream.held:
                stream._pause(next(iter(stream.held)))
            else:
                break
        if set(range(40)) - stream.kept.keys() <= stream.bad and step > 3000:
            break  # nothing is left to compare bad prompts with
        await asyncio.sleep(1.0)
    stream._end_pauses()
    for task in list(stream.in_flight):
        task.cancel()
    await asyncio.gather(*stream.in_flight, return_exceptions=True)
    return stream


@pytest.mark.parametrize("services", [1, 2])
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 1000), marks=pytest.mark.soak)])
def test_prompts_are_blamed_for_what_they_do_and_services_for_the_rest(monkeypatch, seeds, services):
    monkeypatch.setattr(outages, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(outages, "LONGEST_PAUSE_S", 60.0)
    for seed in seeds:
        stream = run_virtually(history(seed, services))
        limit = stream.args.max_prompt_attempts
        assert stream.failure is None
        # While one of two services is down, a single group of the other may be asked in an outage of that one, which
        # costs it an attempt.
        for number, is_good in stream.kept.items() if services == 1 else ():
            assert is_good == (number not in stream.bad), (seed, number)
        for number in stream.bad & stream.kept.keys() if services == 1 else ():
            assert stream.fair[number] + 1 >= limit, f"seed {seed}: {number} was given up without {limit} attempts"
        left = set(range(40)) - stream.kept.keys()
        by_service = [{number for number in left if number % services == one} for one in range(services)]
        # A service of which nothing but bad prompts is left looks down, and the other one waits with it.
        assert left <= stream.bad or any(part and part <= stream.bad for part in by_service), seed


def test_a_service_that_is_down_is_asked_after_growing_waits(monkeypatch):
    monkeypatch.setattr(outages, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(outages, "LONGEST_PAUSE_S", 60.0)

    async def scene() -> Stream:
        stream = Stream(rollout_args(service_outage_timeout=600.0), random.Random(1), groups=5)
        stream.down = {"service 0"}
        stream.rng.choice = lambda options: options[0]
        while (job := stream._next_job()) is not None:
            stream.start(job)
        while stream.failure is None:
            await asyncio.sleep(1.0)
        return stream

    stream = run_virtually(scene())
    probes = stream.asked[5:]
    gaps = [round(b - a) for a, b in zip([0.0, *probes], probes, strict=False)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert max(gaps) <= 60
    assert 600 <= stream.asked[-1] <= 602
    assert isinstance(stream.failure, ServiceOutage)


# What a reward needs


class Judge:
    """A reward whose server is down for some calls, or refuses one sample forever."""

    def __init__(self, down: int = 0, bad: Any = None) -> None:
        self.down, self.bad, self.calls = down, bad, Counter()

    async def __call__(self, args: Any, sample: Sample) -> float:
        self.calls[sample.index] += 1
        await asyncio.sleep(0.1)
        if self.down > 0 or sample.index == self.bad:
            self.down -= 1
            raise HttpRequestError("POST", "http://judge/", "failed", status=None, body="", attempts=1, elapsed=0.0)
        return 1.0


async def scored(judge: Judge, count: int, **changes: Any) -> list[Sample]:
    errors, args = RewardErrors(), rollout_args(rm_type="random", **changes)
    samples = [Sample(index=number) for number in range(count)]
    await asyncio.gather(*(errors.score_one(args, sample, judge) for sample in samples))
    return samples


def test_a_judge_that_is_down_for_a_while_costs_no_sample(caplog):
    samples = run_virtually(scored(Judge(down=30), 8))
    assert [sample.reward for sample in samples] == [1.0] * 8
    assert caplog.text.count("reward random fails for all, and generation pauses") == 1
    assert caplog.text.count("answers again after") == 1


def test_one_sample_that_the_judge_refuses_costs_itself():
    judge = Judge(bad=3)
    samples = run_virtually(scored(judge, 8))
    assert [sample.remove_sample for sample in samples] == [number == 3 for number in range(8)]
    assert judge.calls[3] <= 2, "the others succeeded meanwhile"


def test_one_sample_alone_is_asked_for_a_few_times():
    judge = Judge(bad=0)
    (sample,) = run_virtually(scored(judge, 1))
    assert (sample.reward, sample.remove_sample, judge.calls[0]) == (0.0, True, 3)


def test_a_judge_that_stays_down_ends_the_run_with_its_name():
    with pytest.raises(ServiceOutage, match=r"reward random has failed for all for .*--service-outage-timeout 9\)"):
        run_virtually(scored(Judge(down=10**6), 8, service_outage_timeout=9.0))


@pytest.mark.parametrize(
    ("error", "is_a_service"),
    [
        (ConnectionRefusedError(), True),
        (HttpRequestError("POST", "http://judge/x", "", status=503, body="", attempts=1, elapsed=0.0), True),
        (HttpRequestError("POST", "http://judge/x", "", status=429, body="", attempts=1, elapsed=0.0), True),
        (HttpRequestError("POST", "http://judge/x", "", status=422, body="", attempts=1, elapsed=0.0), False),
        (HttpRequestError("POST", "http://own:1/x", "", status=None, body="", attempts=1, elapsed=0.0), False),
        (type("APIConnectionError", (Exception,), {})(), True),
        (type("ConnectTimeout", (type("TransportError", (Exception,), {}),), {})(), True),
        (ValueError("no number"), False),
        (KeyError("x"), False),
        (FileNotFoundError("x"), False),
    ],
)
def test_what_counts_as_a_failure_of_a_service(error, is_a_service):
    assert is_of_service(error, ["http://own:1"]) == is_a_service


def test_libraries_that_people_use():
    import aiohttp
    import requests

    key = SimpleNamespace(host="h", port=1, ssl=None)
    assert is_of_service(aiohttp.ClientConnectorError(key, OSError("refused")))
    assert is_of_service(requests.exceptions.ConnectionError())
    assert not is_of_service(requests.exceptions.JSONDecodeError("x", "", 0))
