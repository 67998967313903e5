"""A deployment that serves whoever asks: how it is shown, drained and ended."""

from __future__ import annotations

import json
import logging
import stat
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.driver import serving
from slime.ray.driver.program import Terminated
from slime.ray.driver.serving import ServingManager, serve, table
from slime.ray.manager.engines import members as engine_members
from slime.ray.manager.engines.members import State
from slime.ray.remote import EngineDied, RemoteFailure
from slime.servers.http import EngineError
from tests.support.arguments import run_args
from tests.support.fake_fleet import Client, Engine, World


def served_world(world: Callable[..., World], **changes: Any) -> World:
    """A fleet without a trainer, whose engines are restarted."""
    return world(use_fault_tolerance=True, debug_rollout_only=True, **changes)


# The fleet


def test_draining_takes_all_engines_off_and_waits_for_their_requests(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served_world(world)
    held = {"http://e0:1": [2, 1, 0, 0], "http://e1:2": [0, 0, 1, 0, 0, 0]}
    listed: list[list[str]] = []

    def num_requests(client: Client) -> int:
        listed.append(list(run.router.engines))
        return held[client.url].pop(0) if held[client.url] else 0

    monkeypatch.setattr(Client, "num_requests", num_requests)
    monkeypatch.setattr(engine_members, "DRAIN_INTERVAL_S", 0.001)
    assert run.fleet.drain(30.0) == 0
    assert listed == [[]] * len(listed)  # all were off the router first
    assert held["http://e0:1"] == []  # it was seen without requests twice, in a row
    assert len(listed) == 2 * 5


def test_draining_ends_at_its_deadline(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = served_world(world)
    monkeypatch.setattr(Client, "num_requests", lambda client: 3)
    monkeypatch.setattr(engine_members, "DRAIN_INTERVAL_S", 0.001)
    assert run.fleet.drain(0.0) == 6
    assert run.fleet.drain(0.01) == 6


def test_an_engine_that_ends_while_it_drains_holds_nothing(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = served_world(world)

    def gone(client: Client) -> int:
        raise EngineError("GET", client.url, status=None, body="no reply")

    monkeypatch.setattr(Client, "num_requests", gone)
    monkeypatch.setattr(engine_members, "DRAIN_INTERVAL_S", 0.001)
    assert run.fleet.drain(30.0) == 0
    run.member(0).engine.ended_by = "engine 0 exited with code 3."  # type: ignore[attr-defined]
    run.fleet.reap_exited()
    assert len(Engine.started) == 2  # nothing is started in its place
    assert not run.events.failed.is_set()


def test_an_engine_that_is_being_restarted_does_not_join_a_drained_router(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served_world(world)
    monkeypatch.setattr(engine_members, "DRAIN_INTERVAL_S", 0.001)
    Engine.gate.clear()
    run.member(0).engine.ended_by = "engine 0 exited with code 3."  # type: ignore[attr-defined]
    run.fleet.reap_exited()
    run.wait_for(0, State.STARTING)
    assert run.fleet.drain(30.0) == 0
    Engine.gate.set()
    run.wait_for(0, State.NEW)
    assert run.router.engines == []


def test_a_restarted_engine_serves_at_once(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = served_world(world)
    run.member(1).engine.ended_by = "engine 1 exited with code 3."  # type: ignore[attr-defined]
    run.fleet.reap_exited()
    run.wait_for(1, State.SERVING)
    assert "It is restarted, and serves as soon as it generates." in caplog.text
    assert not run.events.need.is_set()


# The manager


@pytest.fixture
def manager(world: Any, monkeypatch: pytest.MonkeyPatch) -> ServingManager:
    """A serving manager whose fleet has been started."""
    monkeypatch.setattr(serving.worker, "begin", lambda args, name: None)
    run = served_world(world, rollout_num_gpus=2)
    monkeypatch.setattr(serving, "EngineFleet", lambda *given: SimpleFleet(run))
    made = ServingManager(run.fleet.args)
    made.world = run  # type: ignore[attr-defined]
    assert made.start((None, [0, 1], [0, 1]), {}) == run.fleet.args.sglang_api_key
    return made


class SimpleFleet:
    """The fleet of a ``World``, which has been started already."""

    def __init__(self, run: World) -> None:
        self._fleet = run.fleet

    def start(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


def test_the_deployment_says_who_serves_where(manager: Any) -> None:
    run: World = manager.world
    assert manager.deployment() == {
        "default": {
            "model_path": run.fleet.args.hf_checkpoint,
            "router": "http://127.0.0.1:1",
            "engines": [
                {"rank": 0, "url": "http://e0:1", "worker_type": "regular", "slots": 1, "state": "serving"},
                {"rank": 1, "url": "http://e1:2", "worker_type": "regular", "slots": 1, "state": "serving"},
            ],
        }
    }
    assert run.fleet.health is not None
    assert run.fleet.health.is_active
    Engine.gate.clear()
    run.member(1).engine.ended_by = "engine 1 exited with code 3."
    run.fleet.reap_exited()
    run.wait_for(1, State.STARTING)
    assert manager.deployment()["default"]["engines"][1] == {
        "rank": 1, "url": None, "worker_type": "regular", "slots": 1, "state": "starting",
    }  # fmt: skip
    Engine.gate.set()
    run.wait_for(1, State.SERVING)
    manager.dispose()
    assert run.router.stopped
    manager.wait_for_failure()  # returns: it is over


def test_the_end_of_a_router_is_the_end(manager: Any) -> None:
    manager.engines.engines_failed(EngineDied("router exited with code 1."))
    with pytest.raises(EngineDied, match="router exited"):
        manager.wait_for_failure()


def test_the_table() -> None:
    engine = {"worker_type": "regular", "slots": 2}
    deployment = {
        "policy": {
            "router": "http://127.0.0.1:30000",
            "engines": [
                {**engine, "rank": 0, "url": "http://127.0.0.1:31000", "state": "serving"},
                {**engine, "rank": 1, "url": None, "state": "starting"},
            ],
        },
        "judge": {"router": "http://127.0.0.1:30001", "engines": []},
    }
    assert table(deployment).splitlines() == [
        "model   router                  engine  url                     type     slots  state",
        "policy  http://127.0.0.1:30000  0       http://127.0.0.1:31000  regular  2      serving",
        "                                1       -                       regular  2      starting",
        "judge   http://127.0.0.1:30001  none",
    ]


# The program


class FakeRay:
    """Calls of the serving manager are answered at once, in the order in which ``serve`` makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **replies: Any) -> None:
        self.calls: list[Any] = []
        self.replies: dict[str, Any] = {"start": None, "deployment": [], "drain": 0, **replies}
        chain = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda args: self))
        monkeypatch.setattr(serving, "ray", SimpleNamespace(remote=lambda kind: chain, wait=self.wait))
        monkeypatch.setattr(serving, "wait_one", lambda ref, *_, **__: self.answer(ref))
        monkeypatch.setattr(serving, "create_placement_groups", lambda args: {"rollout": "slots"})
        monkeypatch.setattr(serving, "handle_sigterm", lambda: None)
        here = SimpleNamespace(
            environment=dict,
            whole_cpu=dict,
            wiring_of_engines=dict,
            name_manager=lambda path: {},
            shutdown=self.shutdown,
        )
        monkeypatch.setattr(serving, "cluster", SimpleNamespace(current=lambda: here, is_connected=lambda: True))

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: (name, given))

    def answer(self, ref: tuple[str, tuple[Any, ...]]) -> Any:
        name, given = ref
        self.calls.append(name if name != "drain" else (name, *given))
        reply = self.replies[name]
        if name == "deployment":
            reply = reply.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def wait(self, refs: list[Any], timeout: float) -> None:
        if refs[0][0] == "dispose":
            self.calls.append("dispose")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


ENGINE = {"rank": 0, "url": "http://127.0.0.1:31000", "worker_type": "regular", "slots": 1, "state": "serving"}
LOST = {**ENGINE, "url": None, "state": "starting"}


def one_model(engine: dict[str, Any]) -> dict[str, Any]:
    return {"default": {"model_path": "/m", "router": "http://127.0.0.1:30000", "engines": [engine]}}


def serve_args(tmp_path: Path) -> Namespace:
    return run_args(run_dir=str(tmp_path / "run"), debug_rollout_only=True, drain_timeout=7.0)


def test_it_is_shown_when_it_changes_and_drained_at_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    file = tmp_path / "run" / "serving.json"
    states = [one_model(ENGINE), one_model(ENGINE), one_model(LOST), one_model(ENGINE), Terminated()]
    fake = FakeRay(monkeypatch, deployment=states)
    monkeypatch.setattr(fake, "wait", lambda refs, timeout: seen.append(file.exists() and json.loads(file.read_text())))
    monkeypatch.setattr(serving.ray, "wait", fake.wait)
    with pytest.raises(Terminated):
        serve(serve_args(tmp_path))
    assert fake.calls == ["start", *["deployment"] * 5, ("drain", 7.0), "shutdown"]
    tables = capsys.readouterr().out
    assert tables.count("model") == 3
    assert tables.count("starting") == 1
    assert [each and each["models"]["default"]["engines"][0]["state"] for each in seen] == [
        "serving", "serving", "starting", "serving", False,
    ]  # fmt: skip
    assert not file.exists()


def test_what_is_not_answered_in_time_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeRay(monkeypatch, deployment=[KeyboardInterrupt()], drain=3)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        serve(serve_args(tmp_path))
    assert "those in flight have 7 s (--drain-timeout)" in caplog.text
    assert "3 requests are not answered after 7 s (--drain-timeout), and end now" in caplog.text


@pytest.mark.parametrize(
    ("replies", "calls"),
    [
        ({"start": Terminated()}, ["start", "dispose", "shutdown"]),
        ({"start": RemoteFailure("no engine")}, ["start", "dispose", "shutdown"]),
        ({"deployment": [EngineDied("the router")]}, ["start", "deployment", "dispose", "shutdown"]),
        (
            {"deployment": [Terminated()], "drain": Terminated()},  # a second signal
            ["start", "deployment", ("drain", 7.0), "dispose", "shutdown"],
        ),
    ],
    ids=["signal while starting", "engine that does not start", "lost router", "second signal"],
)
def test_however_it_ends_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replies: dict[str, Any], calls: list[Any]
) -> None:
    fake = FakeRay(monkeypatch, **replies)
    with pytest.raises((Terminated, RemoteFailure, EngineDied)):
        serve(serve_args(tmp_path))
    assert fake.calls == calls


def test_a_generated_key_is_handed_over_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("first", "second"):  # a run directory that is continued
        FakeRay(monkeypatch, start=key, deployment=[Terminated()])
        with caplog.at_level(logging.INFO), pytest.raises(Terminated):
            serve(serve_args(tmp_path))
    file = tmp_path / "run" / "api_key"
    assert file.read_text() == "second\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"require the API key in {file}" in caplog.text
    assert "second" not in caplog.text.replace(str(file), "")
