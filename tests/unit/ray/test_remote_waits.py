"""Waiting for remote calls: the first failure ends the wait, at once, and the cause comes before its consequences."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import ray.exceptions

from slime.ray import remote
from slime.ray.remote import EngineDied, Peer, RemoteFailure, wait_all, wait_one
from tests.support.fake_ray import NEVER, FakeRay, Ref

PEERS = [Peer(f"actor rank {i}") for i in range(3)]


def consequence(message: str) -> RemoteFailure:
    return RemoteFailure(message, data={"peer_lost": True})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(remote, "ray", fake)
    monkeypatch.setattr(remote, "time", fake)
    return fake


def test_results_come_in_the_order_of_the_references(clock: FakeRay) -> None:
    refs = [Ref("a", at=5), Ref("b", at=1), Ref("c", at=3)]
    assert wait_all(refs, PEERS, "training", 60) == ["a", "b", "c"]
    assert clock.now == 5


def test_nothing_to_wait_for(clock: FakeRay) -> None:
    assert wait_all([], [], "training", 60, [Ref(at=NEVER)]) == []


def test_a_failed_rank_is_reported_at_once_while_others_never_answer(clock: FakeRay) -> None:
    refs = [Ref(at=NEVER), Ref(RemoteFailure("ValueError: bad mask", "the traceback"), at=2.3), Ref(at=NEVER)]
    with pytest.raises(RemoteFailure) as failed:
        wait_all(refs, PEERS, "training on rollout 7", 1000)
    assert str(failed.value).splitlines()[0] == "ValueError: bad mask"
    assert "in actor rank 1, during training on rollout 7" in str(failed.value)
    assert failed.value.details == "the traceback"
    assert clock.now < 2.6  # and not at the end of a second


def test_the_cause_is_reported_before_the_ranks_that_lost_their_peer(clock: FakeRay) -> None:
    refs = [
        Ref(consequence("RuntimeError: Connection closed by peer [10.0.0.1]"), at=1.0),
        Ref(RemoteFailure("OutOfMemoryError: no memory"), at=2.5),
        Ref(consequence("RuntimeError: broken pipe"), at=1.2),
    ]
    with pytest.raises(RemoteFailure) as failed:
        wait_all(refs, PEERS, "training", 1000)
    first, *rest = str(failed.value).splitlines()
    assert first == "OutOfMemoryError: no memory"
    assert "in actor rank 1" in rest[0]
    assert "actor rank 0: RuntimeError: Connection closed by peer [10.0.0.1]" in rest[-1]
    assert "actor rank 2: RuntimeError: broken pipe" in rest[-1]
    assert clock.now < 3.0


def test_once_the_cause_is_known_nothing_waits_for_its_consequences(clock: FakeRay) -> None:
    refs = [
        Ref(RemoteFailure("OutOfMemoryError: no memory"), at=1.0),
        Ref(consequence("RuntimeError: broken pipe"), at=1.1),
        Ref(consequence("RuntimeError: broken pipe"), at=3.5),
    ]
    with pytest.raises(RemoteFailure, match="OutOfMemoryError"):
        wait_all(refs, PEERS, "training", 1000)
    assert clock.now < 1.5


def test_consequences_alone_are_reported_after_a_short_while(clock: FakeRay) -> None:
    refs = [Ref(consequence("RuntimeError: broken pipe"), at=1.0), Ref(at=NEVER), Ref(at=NEVER)]
    with pytest.raises(RemoteFailure, match="broken pipe"):
        wait_all(refs, PEERS, "training", 1000)
    assert clock.now < 1.0 + remote.ROOT_CAUSE_GRACE_S + 0.5


def test_a_rank_that_ended_is_named_with_the_end_of_its_log(clock: FakeRay, tmp_path: Path) -> None:
    log = tmp_path / "actor_rank0.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    died = ray.exceptions.RayActorError(error_msg="The actor died. Worker exit detail: killed by SIGKILL.")
    with pytest.raises(RemoteFailure) as failed:
        wait_one(Ref(died), Peer("actor rank 0", log), "saving", 60)
    text = str(failed.value)
    assert text.startswith("actor rank 0 ended unexpectedly during saving: ")
    assert "SIGKILL" in text.splitlines()[0]
    assert f"The last lines of {log}" in text
    assert text.splitlines()[-1] == "  | line 99"
    assert "line 79" not in text  # the last 20


def test_the_deadline_names_who_did_not_answer(clock: FakeRay) -> None:
    refs = [Ref("done", at=1), Ref(at=NEVER), Ref(at=NEVER)]
    with pytest.raises(TimeoutError) as late:
        wait_all(refs, PEERS, "pushing weights", 30)
    assert str(late.value) == "pushing weights: no answer from actor rank 1, actor rank 2 within 30 s"
    assert 30 < clock.now <= 32


def test_an_answer_before_the_deadline_is_in_time(clock: FakeRay) -> None:
    assert wait_one(Ref("done", at=29.5), PEERS[0], "pushing weights", 30) == "done"


def test_a_long_wait_says_now_and_then_who_is_waited_for(clock: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=remote.__name__):
        wait_all([Ref(at=1), Ref(at=150)], PEERS[:2], "training", 1000)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # after 60 s and after 120 s
    assert all(line.startswith("training: waiting for actor rank 1 for ") for line in said)


def test_an_engine_that_dies_ends_the_wait_at_once(clock: FakeRay) -> None:
    watch = Ref(EngineDied("engine 1 exited with -9"), at=4)
    with pytest.raises(EngineDied, match="engine 1 exited with -9"):
        wait_all([Ref(at=NEVER)], PEERS[:1], "training", 1000, [watch])
    assert clock.now == 4


def test_an_engine_that_dies_explains_the_failures_around_it(clock: FakeRay) -> None:
    """A trainer that cannot reach an engine fails before the watcher has noticed the engine's end."""
    watch = Ref(EngineDied("engine 0 exited with 1"), at=3.0)
    with pytest.raises(EngineDied, match="engine 0 exited with 1"):
        wait_all([Ref(RemoteFailure("ConnectionError: refused"), at=1.0)], PEERS[:1], "pushing weights", 60, [watch])


def test_a_watch_that_ends_peacefully_is_no_failure(clock: FakeRay) -> None:
    assert wait_all([Ref("done", at=9)], PEERS[:1], "saving", 60, [Ref(None, at=1)]) == ["done"]


def test_a_watch_that_ended_peacefully_does_not_make_a_failure_spin(clock: FakeRay) -> None:
    refs = [Ref(consequence("RuntimeError: broken pipe"), at=1.0), Ref(at=NEVER)]
    with pytest.raises(RemoteFailure, match="broken pipe"):
        wait_all(refs, PEERS[:2], "saving", 60, [Ref(None, at=2.0)])
    assert clock.waits < 50


def test_the_end_of_the_watched_manager_is_a_failure_with_its_name(clock: FakeRay) -> None:
    watch = Ref(ray.exceptions.RayActorError(error_msg="gone"), at=1)
    with pytest.raises(RemoteFailure, match="the rollout manager ended unexpectedly during the run: gone"):
        wait_all([Ref(at=NEVER)], PEERS[:1], "training", 60, [watch])


def test_an_error_without_our_wrapping_keeps_type_and_message_first(clock: FakeRay) -> None:
    with pytest.raises(RemoteFailure) as failed:
        wait_one(Ref(KeyError("host")), PEERS[0], "starting", 60)
    assert str(failed.value).splitlines()[0] == "KeyError: 'host'"
