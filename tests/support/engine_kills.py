"""Rollouts while engines are killed or stopped, and the count of everything afterwards."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.router import list_workers
from slime.ray.manager.engines.members import Member, State
from slime.rollout import data_source, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout, get_model_url
from slime.servers import http_client, http_utils
from slime.servers.engine_client import EngineClient
from slime.servers.http import RouterError
from slime.servers.http_utils import post
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.engines import Reference
from tests.support.real_pair import real_fleet
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts
from tests.support.standin_fleet import CountingRouter, StandInFleet

REPLY_TOKENS = 16
ENGINE_WORDS = ("--tokens", REPLY_TOKENS, "--mean-seconds", 0.1, "--sigma", 0.8)
PATIENCE_S = 60.0


@contextlib.contextmanager
def rollout_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Yield what makes the arguments of rollouts on the engines of a router; client and state are made again.

    Without a ``tokenizer`` of their own (stand-ins) a token is a character.
    """
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(http_client, "BACKOFF_CAP_S", 1.0)

    def make(router: tuple[str, int], prompts: int, **overrides: Any) -> SimpleNamespace:
        if "hf_checkpoint" not in overrides:
            for module in (sglang_rollout, data_source):
                monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: CharTokenizer())
        args = rollout_args(
            prompt_data=str(write_prompts(tmp_path / "prompts.jsonl", prompts)),
            sglang_router_ip=router[0],
            sglang_router_port=router[1],
            custom_rm_path=f"{__name__}.reward",
            **{"rollout_request_timeout": 120.0, **overrides},
        )
        http_utils.init_http_client(args)
        return args

    yield make
    if http_utils._http_client is not None:
        run(http_utils._http_client.close())
    SingletonMeta.clear_instances()


async def reward(args: Any, sample: Sample, **_: Any) -> float:
    """No work: engines are the subject."""
    return 1.0


@dataclass
class Tally:
    """Checked results of rollouts: every sample once, whole groups, no token more or less than an answer has."""

    args: SimpleNamespace
    source: RolloutDataSourceWithBuffer = field(init=False)
    seen: set[int] = field(default_factory=set)
    rollouts: int = 0

    def __post_init__(self) -> None:
        self.source = RolloutDataSourceWithBuffer(self.args)

    def rollout(self) -> None:
        """Generate one rollout and check it."""
        groups = generate_rollout(self.args, self.rollouts, self.source).samples
        self.rollouts += 1
        assert len(groups) == self.args.rollout_batch_size
        for group in groups:
            assert len(group) == self.args.n_samples_per_prompt
            assert len({sample.group_index for sample in group}) == 1
        samples = list(iter_samples(groups))
        for sample in samples:
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            assert sample.response_length == len(sample.rollout_log_probs) == REPLY_TOKENS
            assert len(sample.tokens) == len(sample.prompt) + REPLY_TOKENS
            assert all(math.isfinite(log_prob) for log_prob in sample.rollout_log_probs)
        indices = Counter(sample.index for sample in samples)
        assert max(indices.values()) == 1
        assert not self.seen & set(indices), "a sample was used twice"
        self.seen |= set(indices)

    def check_nothing_lost(self) -> None:
        """Assert that every drawn prompt was used, or waits in the buffer."""
        waiting = [sample.index for sample in iter_samples(self.source.buffer)]
        assert len(waiting) == len(set(waiting))
        assert not self.seen & set(waiting)
        assert self.source.sample_index == len(self.seen) + len(waiting), "samples were lost"


class Killer:
    """Kills one engine of those that serve, ``kills`` times, at random moments while ``busy`` is set.

    It waits for ``reserve`` others to serve first.
    """

    def __init__(self, standins: StandInFleet, kills: int, seed: int, reserve: int = 1) -> None:
        self.standins, self.kills, self.reserve = standins, kills, reserve
        self.done = 0
        self.busy = threading.Event()
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.busy.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while self.done < self.kills and not self._over.wait(self._random.uniform(0.05, 0.4)):
            self.busy.wait(PATIENCE_S)
            serving = self.standins.serving()
            if len(serving) > self.reserve and not self._over.is_set():
                self._random.choice(serving).send(signal.SIGKILL)
                self.done += 1


class Driver:
    """The driver's part in faults: pushes of weights, after rollouts and when no engine is left that serves."""

    def __init__(self, standins: StandInFleet) -> None:
        self.standins, self.in_need = standins, 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.standins.events.need.set()
        self._thread.join(PATIENCE_S)

    def push(self) -> None:
        """Repeat the steps of ``RayTrainGroup.update_weights`` around a push."""
        with self._lock:
            self.standins.fleet.recover()
            self.standins.events.need.clear()
            self.standins.fleet.offer()
            self.standins.fleet.admit()

    def _watch(self) -> None:
        while self.standins.events.need.wait() and not self._over.is_set():
            self.in_need += 1
            self.push()


def kill_engines(
    standins: StandInFleet, router: CountingRouter, make_args: Callable[..., SimpleNamespace], kills: int
) -> str:
    """Roll out until ``kills`` engines were killed in the middle of it, recovering before every push of weights.

    Returns what happened, in words.
    """
    args = make_args(standins.address, prompts=20_000, rollout_batch_size=8, over_sampling_batch_size=8)
    tally = Tally(args)
    with Killer(standins, kills, seed=kills) as killer, Driver(standins) as driver:
        while killer.done < kills:
            assert tally.rollouts < 100 * kills, f"{killer.done} kills in {tally.rollouts} rollouts"
            killer.busy.set()
            tally.rollout()
            killer.busy.clear()
            driver.push()
        tally.rollout()
        standins.fleet.reap_exited()  # the last to be killed may not have been noticed yet
        driver.push()
    tally.check_nothing_lost()
    fleet = standins.fleet
    assert fleet.members.lost >= kills
    assert fleet.members.restarted == fleet.members.lost
    assert len(standins.serving()) == len(fleet.plans)
    assert not standins.events.failed.is_set()
    # Every request was answered once, or broke off with its engine: nothing that others worked on was asked for again.
    assert router.forwarded == len(tally.seen) + router.broken
    assert router.broken > 0, "no engine was killed while it had requests"
    return (
        f"{kills} kills in {tally.rollouts} rollouts: {len(tally.seen)} samples, each once; "
        f"{router.broken} requests broke off and were retried; "
        f"{driver.in_need} times no engine was left for a while"
    )


def kill_router(standins: StandInFleet, make_args: Callable[..., SimpleNamespace], kills: int) -> str:
    """Roll out while the fleet's router is killed ``kills`` times at random moments; return what happened, in words."""
    model, address = standins.fleet.models[0], standins.address
    tally = Tally(make_args(address, prompts=20_000, rollout_batch_size=8, over_sampling_batch_size=8))
    moments, over = random.Random(kills), threading.Event()
    back: list[float] = []

    def kill() -> None:
        for number in range(kills):
            if over.wait(moments.uniform(0.05, 0.5)):
                return
            killed = time.monotonic()
            os.kill(model.running_router.pid, signal.SIGKILL)  # type: ignore[arg-type, union-attr]
            while model.router_restarts == number or not _lists_all(standins):
                if over.wait(0.01):
                    return
            back.append(time.monotonic() - killed)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not standins.events.failed.is_set():
            tally.rollout()
        tally.rollout()
    finally:
        over.set()
        thread.join(PATIENCE_S)
    tally.check_nothing_lost()
    assert standins.events.failure is None
    assert model.router_restarts == len(back) == kills
    assert standins.address == model.address == address
    assert standins.fleet.members.lost == 0
    assert standins.fleet.counts()["rollout/engines/router_restarts"] == kills
    slowest = max(back)
    return (
        f"{kills} kills, {tally.rollouts} rollouts: {len(tally.seen)} samples, each once; back within {slowest:.1f} s"
    )


def _lists_all(standins: StandInFleet) -> bool:
    url = standins.fleet.models[0].running_router.url
    try:
        listed = {worker["url"] for worker in list_workers(url, api_key=standins.args.sglang_api_key, timeout=2.0)}
    except RouterError:
        return False
    return listed == {member.known_info.url for member in standins.fleet.members.of(State.SERVING)}


def replace_who_answers_garbage(
    standins: StandInFleet, make_args: Callable[..., SimpleNamespace], oldest_version: int | None = None
) -> str:
    """Roll out while one of the engines gives answers that must not be trained on, until it has been replaced.

    Returns what happened, in words.
    """
    args = make_args(standins.address, prompts=20_000, rollout_batch_size=8, over_sampling_batch_size=8)
    tally, members = Tally(args), standins.fleet.members
    answers = http_utils.get_http_client().answers
    answers.report = standins.fleet.note_rejected
    router_url = standins.fleet.models[0].running_router.url
    if oldest_version is not None:
        answers.oldest_version[router_url] = oldest_version
    began = time.monotonic()
    while not members.lost:
        assert time.monotonic() - began < PATIENCE_S, f"{members.rejected_of} answers were rejected"
        tally.rollout()
    seconds = time.monotonic() - began
    assert standins.fleet.recover() == 1
    standins.fleet.offer()
    standins.fleet.admit()
    rejected = members.rejected_of.total()
    assert rejected == answers.rejected.total() > 0
    for _ in range(3):
        tally.rollout()
    tally.check_nothing_lost()
    assert members.rejected_of.total() == rejected, "its successor is as bad"
    assert members.lost == members.restarted == 1
    assert standins.fleet.counts()["rollout/engines/rejected_answers"] == rejected
    assert not standins.events.failed.is_set()
    return f"{rejected} answers rejected, the engine taken off after {seconds:.1f} s; {len(tally.seen)} samples"


def stop_an_engine(
    standins: StandInFleet, router: CountingRouter, make_args: Callable[..., SimpleNamespace], seconds: float
) -> str:
    """Stop one of the engines in the middle of a rollout, and let it continue ``seconds`` later; roll out meanwhile.

    Under fault tolerance it does not continue before its loss was noticed, however long that takes on a busy machine.

    Rollouts are over-sampled, so that they end without what the stopped engine has: that is asked for again from the
    others, and the stopped engine's replies come late. Returns what happened, in words.
    """
    sizes = {"rollout_batch_size": 4, "over_sampling_batch_size": 16, "n_samples_per_prompt": 1}
    tally = Tally(make_args(standins.address, prompts=20_000, **sizes))
    tally.rollout()
    victim = standins.serving()[0]
    stopped, goes_on = threading.Event(), threading.Event()

    def stop_for_a_while() -> None:
        while router.busy == 0:
            threading.Event().wait(0.002)
        victim.send(signal.SIGSTOP)
        stopped.set()
        threading.Event().wait(seconds)
        deadline = time.monotonic() + PATIENCE_S
        while standins.args.use_fault_tolerance and not standins.fleet.members.lost and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile: SIGKILL reaches the stopped too
            victim.send(signal.SIGCONT)
        goes_on.set()

    thread = threading.Thread(target=stop_for_a_while, daemon=True)
    thread.start()
    before = tally.rollouts
    while not goes_on.is_set():
        tally.rollout()
    meanwhile = tally.rollouts - before
    thread.join()
    for _ in range(3):
        standins.fleet.recover()
        standins.fleet.offer()
        standins.fleet.admit()
        tally.rollout()
    tally.check_nothing_lost()
    assert router.forwarded > len(tally.seen), "nothing was asked for again"
    return (
        f"stopped for {seconds:g} s: {meanwhile} rollouts meanwhile, {len(tally.seen)} samples, each once, "
        f"of {router.forwarded} requests; engines lost {standins.fleet.members.lost}"
    )


async def judged(args: Any, sample: Sample, **_: Any) -> float:
    """Ask the frozen model."""
    payload = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 4}}
    reply = await post(get_model_url(args, "judge"), payload)
    return float(reply["meta_info"]["completion_tokens"])


def kill_each_model(
    standins: StandInFleet,
    routers: Mapping[str, CountingRouter],
    make_args: Callable[..., SimpleNamespace],
    order: Sequence[str],
) -> str:
    """Kill the only engine of a model in the middle of a rollout, for each name in ``order``; rewards ask the judge.

    Returns what happened, in words.
    """
    args = make_args(standins.address, prompts=20_000, rollout_batch_size=4, over_sampling_batch_size=4)
    args.custom_rm_path = f"{__name__}.judged"
    args.sglang_model_routers = standins.args.sglang_model_routers
    tally = Tally(args)
    members = standins.fleet.members

    def kill(name: str) -> None:
        while routers[name].busy == 0:
            threading.Event().wait(0.002)
        (engine,) = [member.engine for member in members.of(State.SERVING, model=name)]
        engine.send(signal.SIGKILL)  # type: ignore[attr-defined]

    with Driver(standins) as driver:
        for name in order:
            thread = threading.Thread(target=kill, args=(name,), daemon=True)
            thread.start()
            tally.rollout()
            thread.join(PATIENCE_S)
            driver.push()
        tally.rollout()
    tally.check_nothing_lost()
    assert not standins.events.failed.is_set()
    for name in routers:
        assert members.lost_of[name] == members.restarted_of[name] == list(order).count(name)
        assert routers[name].broken > 0
    # The actor's engine is the only one that rollouts had to wait for weights of.
    assert driver.in_need == list(order).count("actor")
    return f"{len(order)} kills, {len(tally.seen)} samples, each once"


def kill_one_of_two(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, root: Path, seed: int, response_len: int = 900
) -> str:
    """On a fresh pair of real engines: kill one in the middle of a rollout, and get it back for the next one.

    Returns what happened, in words.
    """
    with (
        real_fleet(monkeypatch, checkpoint, root, 2, use_fault_tolerance=True) as (fleet, events),
        rollout_client(monkeypatch, root) as make_args,
    ):
        fleet.resume_checks()
        args = make_args(
            (fleet.args.sglang_router_ip, fleet.args.sglang_router_port),
            prompts=64,
            hf_checkpoint=str(checkpoint),
            rollout_max_response_len=response_len,
            rollout_batch_size=6,
            over_sampling_batch_size=6,
        )
        source = RolloutDataSourceWithBuffer(args)
        victim, survivor = random.Random(seed).sample(fleet.members.all(), 2)
        reported: list[str] = []
        held: list[int] = []

        def kill() -> None:
            moment = random.Random(seed).uniform(0.0, 0.8)
            while num_requests(victim) < 2 or num_requests(survivor) < 2:
                threading.Event().wait(0.01)
            threading.Event().wait(moment)
            held.append(num_requests(victim))
            os.kill(victim.engine.pid, signal.SIGKILL)
            reported.append(f"killed {moment:.2f} s after its first requests, with {held[0]} in flight")

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        groups = generate_rollout(args, 0, source).samples
        thread.join(PATIENCE_S)
        assert reported, "the rollout ended before the engine was killed"
        assert held[0] > 0, "the engine was killed when it had no request any more"
        _check_real(args, checkpoint, groups, 6)
        assert fleet.members.lost == 1
        assert victim.state is State.DEAD
        assert survivor.state is State.SERVING
        assert survivor.engine.poll() is None
        assert fleet.recover() == 1
        offered = {info.url for info in fleet.offer()}
        fleet.admit()
        assert {
            worker["url"]
            for worker in list_workers(fleet.models[0].running_router.url, api_key=fleet.args.sglang_api_key)
        } == offered
        assert len(offered) == 2
        groups += generate_rollout(args, 1, source).samples
        _check_real(args, checkpoint, groups, 12)
        assert source.sample_index == 24
        assert not source.buffer
        assert not events.failed.is_set()
        return reported[0]


def num_requests(member: Member) -> int:
    """Return how many requests an engine holds."""
    return EngineClient(member.known_info.url, member.known_info.api_key).num_requests()


def _check_real(args: SimpleNamespace, checkpoint: Path, groups: Any, count: int) -> None:
    assert len(groups) == count
    samples = list(iter_samples(groups))
    assert sorted(sample.index for sample in samples) == list(range(2 * count))
    reference = Reference(checkpoint)
    for sample in samples:
        assert 0 < sample.response_length <= args.rollout_max_response_len
        assert sample.response_length == len(sample.rollout_log_probs)
        prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
        expected = reference.log_probs(prompt, response)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), expected, atol=1e-4)
