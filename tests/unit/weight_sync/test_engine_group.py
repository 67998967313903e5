"""The process group to the engines: its first broadcast has a deadline, and a group that hangs is aborted."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.servers.types import EngineInfo
from slime.utils.structured_error import StructuredError
from slime.weight_sync import process_group
from slime.weight_sync.buckets import Bucket
from slime.weight_sync.fanout import WeightSyncError
from slime.weight_sync.process_group import EngineGroup

BUCKET = Bucket((("a", torch.zeros(3)),), is_last=True)


class Client:
    """An engine that joins, and raises ``answer`` at a push."""

    url = "http://engine"

    def __init__(self) -> None:
        self.answer: Exception | None = None
        self.told: list[dict[str, Any]] = []

    def init_weights_update_group(self, **about: Any) -> None:
        pass

    def destroy_weights_update_group(self, **about: Any) -> None:
        pass

    def update_weights_from_distributed(self, **about: Any) -> None:
        self.told.append(about)
        if self.answer is not None:
            raise self.answer


class Work:
    """A broadcast that has ended, or never does."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.is_set()


class Torch:
    """torch.distributed: ``connected`` when the communicator is there, ``ended`` when broadcasts end."""

    def __init__(self) -> None:
        self.connected, self.ended = threading.Event(), threading.Event()
        self.closed: list[str] = []

    def broadcast(self, flat: torch.Tensor, **how: Any) -> Work:
        self.connected.wait(10)
        return Work(self.ended)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Torch:
    wire = Torch()
    monkeypatch.setattr(process_group, "init_process_group", lambda *a, **k: "group")
    monkeypatch.setattr(process_group.dist, "broadcast", wire.broadcast)
    monkeypatch.setattr(process_group.dist, "destroy_process_group", lambda group: wire.closed.append("destroyed"))
    monkeypatch.setattr(process_group, "_abort_process_group", lambda group: wire.closed.append("aborted"))
    return wire


def group_of(client: Client, backend: str, timeout_s: float = 0.3) -> EngineGroup:
    clients: Any = [client]
    return EngineGroup([EngineInfo(client.url)], clients, name="slime", backend=backend, timeout_s=timeout_s)


def test_a_communicator_that_is_never_made_ends_the_push_at_the_deadline(wire: Torch) -> None:
    group = group_of(Client(), "nccl")
    with pytest.raises(WeightSyncError, match="did not end within"):
        group.send(BUCKET, weight_version="1")
    group.close()
    assert wire.closed == ["aborted"]
    wire.connected.set()


def test_an_engine_that_refuses_ends_the_wait_for_the_communicator(wire: Torch) -> None:
    client = Client()
    client.answer = RuntimeError("no such group")
    group = group_of(client, "nccl", timeout_s=10.0)
    with pytest.raises(WeightSyncError, match="no such group"):
        group.send(BUCKET, weight_version="1")
    group.close()
    assert wire.closed == ["aborted"]
    wire.connected.set()


@pytest.mark.parametrize(("backend", "closed"), [("nccl", "aborted"), ("gloo", "destroyed")])
def test_a_broadcast_that_never_ends(backend: str, closed: str, wire: Torch) -> None:
    wire.connected.set()
    group = group_of(Client(), backend)
    with pytest.raises(WeightSyncError, match="did not end within"):
        group.send(BUCKET, weight_version="1")
    group.close()
    assert wire.closed == [closed]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_group_whose_broadcasts_ended_is_left_in_peace(backend: str, wire: Torch) -> None:
    """Also when an engine did not want what it has received."""
    wire.connected.set()
    wire.ended.set()
    client = Client()
    group = group_of(client, backend)
    group.send(BUCKET, weight_version="1")
    client.answer = StructuredError("not for this engine", {"refused": True})
    with pytest.raises(WeightSyncError, match="not for this engine"):
        group.send(BUCKET, weight_version=None, as_dtype="slime_changes")
    group.close()
    assert wire.closed == ["destroyed"]
    assert [told["dtypes"] for told in client.told] == [["float32"], ["slime_changes"]]


def test_a_refusal_does_not_end_a_broadcast_that_others_still_receive(wire: Torch) -> None:
    wire.connected.set()
    client = Client()
    client.answer = StructuredError("not for this engine", {"refused": True})
    threading.Timer(0.1, wire.ended.set).start()
    group = group_of(client, "gloo", timeout_s=10.0)
    with pytest.raises(WeightSyncError, match="not for this engine"):
        group.send(BUCKET, weight_version=None)
    assert wire.ended.is_set()


def test_the_file_where_a_group_meets_is_there_until_every_engine_has_left(wire: Torch) -> None:
    """torch's FileStore writes to it when an engine leaves, and waits for its timeout if it is gone by then."""
    seen: list[bool] = []

    class LastToLeave(Client):
        url = "http://127.0.0.1:1"

        def destroy_weights_update_group(self, **about: Any) -> None:
            time.sleep(0.3)
            seen.append(Path(self.told[0]["master_address"]).parent.exists())

        def init_weights_update_group(self, **about: Any) -> None:
            self.told.append(about)

    client = LastToLeave()
    group = group_of(client, "gloo", timeout_s=10.0)
    group.close()
    assert wire.closed == ["destroyed"]
    assert seen == [True]
    assert not Path(client.told[0]["master_address"]).parent.exists()
