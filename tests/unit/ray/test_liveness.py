"""Noticing the end of processes that are not waited for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import remote
from slime.ray.remote import LivenessMonitor, Peer, RemoteFailure


class World:
    """Two actors whose answers are set by hand, a clock, and the parts of Ray that are used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 100.0, []
        self.answers: dict[str, Exception | None] = {}
        self.actors = [SimpleNamespace(ping=SimpleNamespace(remote=lambda n=n: self.ask(n))) for n in range(2)]
        monkeypatch.setattr(remote.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(remote.ray, "wait", self.wait)
        monkeypatch.setattr(remote.ray, "get", self.get)
        self.liveness = LivenessMonitor(self.actors, [Peer("critic rank 0"), Peer("critic rank 1")])

    def ask(self, number: int) -> str:
        self.asked.append(number)
        return f"{number}.{len(self.asked)}"

    def wait(self, refs, **_):
        return [ref for ref in refs if ref in self.answers], []

    def get(self, ref):
        if (error := self.answers[ref]) is not None:
            raise error

    def check(self, seconds: float) -> None:
        self.now += seconds
        self.liveness.check("training the actor")


@pytest.fixture
def world(monkeypatch) -> World:
    return World(monkeypatch)


def test_the_end_of_a_process_is_reported_with_its_name(world):
    world.check(0)
    world.answers["1.2"] = remote.ray.exceptions.RayActorError(error_msg="Worker exit detail: killed by SIGKILL")
    with pytest.raises(RemoteFailure, match=r"critic rank 1 ended unexpectedly during training the actor: .*SIGKILL"):
        world.check(0)


def test_busy_processes_are_not_asked_again_and_idle_ones_now_and_then(world):
    world.check(0)
    assert world.asked == [0, 1]
    world.answers["0.1"] = None
    world.check(remote.PING_EVERY_S / 2)
    assert world.asked == [0, 1]
    world.check(remote.PING_EVERY_S)
    assert world.asked == [0, 1, 0]  # rank 1 has not answered yet: it works
