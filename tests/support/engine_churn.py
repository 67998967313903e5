"""Rollouts while stand-in engines join, leave and die at random moments, and the count of everything afterwards."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from slime.ray.manager.engines import slots as engine_slots
from slime.ray.manager.engines.members import EngineChangeError, State
from tests.support.engine_kills import PATIENCE_S, REPLY_TOKENS, Driver, Tally
from tests.support.standin_fleet import CountingRouter, StandInFleet

MOST = 4


class NoReservation:
    """Stand-ins need no slots."""

    slots = None

    def __init__(self, *_: object, **__: object) -> None: ...
    def release(self) -> None: ...


class Churn:
    """Adds, removes or kills an engine, ``changes`` times, at random moments while ``busy`` is set."""

    def __init__(self, standins: StandInFleet, changes: int, seed: int) -> None:
        self.standins, self.changes = standins, changes
        self.done: Counter[str] = Counter()
        self.aborted = self.refused = 0
        self.busy = threading.Event()
        self.failure: BaseException | None = None
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.busy.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            while self.done.total() < self.changes and not self._over.wait(self._random.uniform(0.05, 0.3)):
                self.busy.wait(PATIENCE_S)
                self._change()
        except Exception as e:  # noqa: BLE001  (reported by the main thread)
            self.failure = e

    def _change(self) -> None:
        fleet, lifecycle = self.standins.fleet, self.standins.fleet.lifecycle
        serving = fleet.members.of(State.SERVING)
        what = self._random.choice(["add", "remove", "remove", "kill"] if len(serving) > 1 else ["add"])
        if self._over.is_set() or not serving:
            return
        try:
            if what == "add":
                lifecycle.add(count=self._random.choice([1, 2]))
            elif what == "remove":
                self.aborted += lifecycle.remove([self._random.choice(serving).rank], self._random.choice([0.0, 0.3]))
            else:
                self._random.choice(serving).engine.send(signal.SIGKILL)  # type: ignore[attr-defined]
        except EngineChangeError:  # there are as many as there may be, or the others have just died
            self.refused += 1
        else:
            self.done[what] += 1


def churn_engines(
    monkeypatch: pytest.MonkeyPatch,
    standins: StandInFleet,
    router: CountingRouter,
    make_args: Callable[..., SimpleNamespace],
    changes: int,
) -> str:
    """Roll out until engines have joined, left and died so often, with a push after every rollout.

    Returns what happened, in words.
    """
    monkeypatch.setattr(engine_slots, "Reservation", NoReservation)
    standins.args.rollout_max_engines = MOST
    args = make_args(
        standins.address,
        prompts=40_000,
        rollout_batch_size=8,
        over_sampling_batch_size=8,
        rollout_max_response_len=REPLY_TOKENS,
    )
    tally = Tally(args)
    fleet = standins.fleet
    with Churn(standins, changes, seed=changes) as churn, Driver(standins) as driver:
        while churn.done.total() < changes:
            assert churn.failure is None, churn.failure
            assert tally.rollouts < 100 * changes
            churn.busy.set()
            tally.rollout()
            churn.busy.clear()
            driver.push()
        tally.rollout()
        fleet.reap_exited()
        driver.push()
    tally.check_nothing_lost()
    members = fleet.members
    assert not standins.events.failed.is_set()
    assert members.removed == churn.done["remove"]
    assert 0 < len(standins.serving()) <= MOST
    # Every request was answered once, broke off with its engine, or was aborted with it: no other was asked for again.
    assert router.forwarded <= len(tally.seen) + router.broken + churn.aborted
    assert router.forwarded >= len(tally.seen) + router.broken
    return (
        f"{dict(churn.done)} ({churn.refused} refused) in {tally.rollouts} rollouts: {len(tally.seen)} samples, each "
        f"once; {churn.aborted} requests were aborted and {router.broken} broke off, and were sent again; "
        f"{members.added} engines joined, {members.removed} left, {members.lost} died"
    )
