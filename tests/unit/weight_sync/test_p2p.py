"""Weights written into the memory of models by several trainer ranks, without engines: all of this process."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.servers.types import EngineInfo
from slime.weight_sync import p2p
from slime.weight_sync.fanout import WeightSyncError
from slime.weight_sync.p2p import Sender, share_of
from slime.weights.p2p import agents, rendezvous
from slime.weights.p2p.agents import TransferError, Write
from tests.support.engine_plugin import engine_plugin
from tests.support.loaders import DENSE, KINDS, Dense, contents, described, random_weights


class Memory:
    """An agent that copies within this process, what is registered alone; ``reasons``: peers that fail."""

    numbers = itertools.count()
    registered: dict[str, list[tuple[int, int]]] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.name = f"agent {next(self.numbers)}"
        self.registered[self.name] = []
        self.sizes: list[int] = []
        self.reasons: dict[str, str | None] = {}

    def register(self, regions: Iterable[tuple[int, int]], owner: object) -> None:
        self.registered[self.name] += regions

    def address(self) -> str:
        return self.name

    def connect(self, address: str) -> str:
        return address

    def write(self, writes: Mapping[str, Sequence[Write]], deadline_s: float) -> None:
        if self.reasons:
            raise TransferError(self.reasons)
        for peer, parts in writes.items():
            for part in parts:
                assert self.holds(self.name, part.local, part.nbytes)
                assert self.holds(peer, part.remote, part.nbytes)
                ctypes.memmove(part.remote, part.local, part.nbytes)
        self.sizes.append(sum(part.nbytes for parts in writes.values() for part in parts))

    def holds(self, name: str, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self.registered[name])

    def close(self) -> None:
        del self.registered[self.name]


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    """The plug-in's module, with stand-ins for what it imports of SGLang."""
    with engine_plugin({"distributed": {"get_tp_group": lambda: SimpleNamespace(world_size=1)}}) as load:
        yield load("weights.p2p")


class Push:
    """Trainer ranks that send ``weights`` to models; each stage has a part of them, and ``sharers`` ranks."""

    def __init__(
        self, plugin: Any, patch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor], models: Sequence[Any], *,
        stages: int = 1, sharers: int = 1, limit: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.plugin, self.weights, self.models = plugin, weights, models
        patch.setattr(plugin, "make_agent", lambda backend: Memory())
        self.store = dist.HashStore()
        tensors = described(weights)
        rendezvous.put(self.store, rendezvous.TENSORS, tensors)
        parts = [tensors[stage::stages] for stage in range(stages)]
        ranks = [(stage, parts[stage]) for stage in range(stages) for _ in range(sharers)]
        self.channels = [
            plugin.open_channel(model, self.store, "nixl", rank, len(ranks)) for rank, model in enumerate(models)
        ]
        self.senders = []
        for rank in range(len(ranks)):
            mine = share_of(rank, ranks)
            numbers = {name: number for number, name in enumerate(weights) if name in mine}
            sender = Sender(Memory(), numbers, 1.0)
            for engine in range(len(models)):
                sender.add(f"http://engine{engine}", rendezvous.get_rank(self.store, engine))
            sender.allocate(limit)
            self.senders.append(sender)

    def send(self) -> int:
        sent = 0
        for trainer, sender in enumerate(self.senders):
            for name, tensor in self.weights.items():
                sender.send(name, tensor)
            sender.flush()
            for rank, sums in enumerate(sender.sums):
                rendezvous.put(self.store, rendezvous.sums_key(trainer, rank), sums)
            sent += sender.finish()
        return sent

    def confirm(self) -> None:
        for model, channel in zip(self.models, self.channels, strict=True):
            self.plugin.compare(model, channel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "sharers", "limit"), [(1, 1, 1 << 20), (2, 3, 1), (3, 1, 700)])
def test_two_engines_of_two_ranks_have_what_they_would_have_loaded(
    kind: str, stages: int, sharers: int, limit: int, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shapes = KINDS[kind]
    models = [make(rank, 2, dtype) for dtype in (torch.float32, torch.bfloat16) for rank in range(2)]
    weights = random_weights(shapes, torch.float32)
    push = Push(plugin, monkeypatch, weights, models, stages=stages, sharers=sharers, limit=limit)
    for seed in (1, 2):
        weights.update(random_weights(shapes, torch.float32, seed))
        sent = push.send()
        push.confirm()
        expected = [make(rank, 2, dtype) for dtype in (torch.float32, torch.bfloat16) for rank in range(2)]
        for model, loaded in zip(models, expected, strict=True):
            loaded.load_weights(weights.items())
            found, wanted = contents(model), contents(loaded)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        # Everything but the padded row of each second rank is on the wire once per engine rank that holds it.
        padding = sum(t[-1].nbytes for m in models[1::2] for n, t in contents(m).items() if n in ("embed", "lm_head"))
        assert sent == sum(t.nbytes for m in models for t in contents(m).values()) - padding
    for sender in push.senders:
        largest = max(t.numel() * 4 for t in weights.values())
        assert sender._buffer.numel() <= max(limit, largest)


def test_ranks_that_are_laid_out_alike_share_what_is_packed(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(DENSE, torch.float32)
    models = [Dense(rank, 2, torch.float32) for _ in range(3) for rank in range(2)]
    push = Push(plugin, monkeypatch, weights, models)
    (sender,) = push.senders
    # Norm, keys and values are the same on both ranks of an engine.
    assert sender._buffer.numel() == sum(t.nbytes for t in weights.values())
    sent = push.send()
    push.confirm()
    assert sender.agent.sizes == [sent]


def test_what_does_not_arrive_is_found_and_named(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(DENSE, torch.float32)
    models = [Dense(rank, 2, torch.bfloat16) for rank in range(2)]
    push = Push(plugin, monkeypatch, weights, models, sharers=2)
    push.send()
    push.confirm()
    models[1].o.data[3, 5] += 1
    with pytest.raises(plugin.RefusedError, match=r"^1 of 9 blocks of parameters are not .* the first in o$"):
        push.confirm()
    push.send()
    push.confirm()
    rendezvous.put(push.store, rendezvous.sums_key(1, 0), {})  # what a trainer rank has not written
    with pytest.raises(plugin.RefusedError, match="blocks of parameters are not what the trainer has written"):
        push.confirm()
    models[0].norm = torch.nn.Parameter(models[0].norm.data.clone(), requires_grad=False)
    weights["norm.weight"] += 1
    push.send()
    with pytest.raises(plugin.RefusedError, match="the first in norm"):  # it is elsewhere now
        push.confirm()


class Updater:
    """The part of SGLang's that is hooked."""

    tp_rank = 1

    def __init__(self, model: Any) -> None:
        self.model, self.asked = model, []

    def get_model(self) -> Any:
        return self.model

    def stock(self, *request: Any) -> tuple[bool, str]:
        self.asked.append(request[1:])
        return True, "stock"


def test_requests_of_other_groups_are_left_to_the_server(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = Updater(Dense(0, 1, torch.float32))
    for call, request in (
        (plugin.join, ("127.0.0.1", 1234, 0, 2, "slime", "gloo")),
        (plugin.confirm, (["w"], ["float32"], [[2]], "slime", "flattened_bucket")),
        (plugin.leave, ("slime",)),
    ):
        assert call(updater.stock, updater, *request) == (True, "stock")
        assert updater.asked.pop() == request


def test_a_group_of_ours_is_joined_confirmed_and_left(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weights = random_weights(DENSE, torch.float32)
    rendezvous.put(store, rendezvous.TENSORS, described(weights))
    monkeypatch.setattr(plugin, "make_agent", lambda backend: Memory())
    updater = Updater(Dense(0, 1, torch.float32))
    before = len(Memory.registered)
    join = ("127.0.0.1", store.port, 4, 1, "slime-p2p", "slime-p2p-nixl")
    assert plugin.join(updater.stock, updater, *join) == (True, "Success")
    assert plugin.join(updater.stock, updater, *join) == (True, "Success")  # another trainer, after the first has ended
    assert len(Memory.registered) == before + 1
    engine = rendezvous.get_rank(store, 5)
    assert engine.parameters["qkv"] == (updater.model.qkv.data_ptr(), "float32")
    sender = Sender(Memory(), {name: number for number, name in enumerate(weights)}, 1.0)
    sender.add("http://engine", engine)
    sender.allocate(1000)
    for name, tensor in weights.items():
        sender.send(name, tensor)
    sender.flush()
    rendezvous.put(store, rendezvous.sums_key(0, 5), sender.sums[0])
    assert plugin.confirm(updater.stock, updater, [], [], [], "slime-p2p") == (True, "Success")
    updater.model.norm.data[0] += 1
    done, why = plugin.confirm(updater.stock, updater, [], [], [], "slime-p2p")
    assert not done
    assert why.startswith("--update-weight-transport p2p: rank 0: 1 of 9 blocks")
    assert plugin.leave(updater.stock, updater, "slime-p2p") == (True, "Success")
    assert not updater.asked

    del weights["norm.weight"]
    rendezvous.put(store, rendezvous.TENSORS, described(weights))
    done, why = plugin.join(updater.stock, updater, *join)
    assert not done
    assert "rank 0: norm has elements that none of the trainer's tensors is loaded into" in why


def test_engines_that_fail_or_are_late_are_named(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Dense(rank, 2, torch.float32) for rank in range(2)]
    push = Push(plugin, monkeypatch, random_weights(DENSE, torch.float32), models)
    (sender,) = push.senders
    first, second = (target.peer for target in sender._targets)
    sender.agent.reasons = {first: None, second: "connection reset"}
    with pytest.raises(WeightSyncError, match=r"(?s)on 2 of 2 engines:.*engine1: connection reset") as raised:
        push.send()
    assert raised.value.data["hanging"] == {"http://engine0": "could not write weights into the memory"}


def test_every_tensor_is_written_by_one_rank_of_its_stage() -> None:
    parts = [[(f"{stage}.{i}", (i + 1, 8), "float32") for i in range(40)] for stage in range(2)]
    ranks = [(0, parts[0])] * 3 + [(1, parts[1])]
    shares = [share_of(rank, ranks) for rank in range(4)]
    assert sorted(name for share in shares[:3] for name in share) == sorted(name for name, *_ in parts[0])
    assert shares[3] == {name for name, *_ in parts[1]}
    rows = [sum(int(name.split(".")[1]) + 1 for name in share) for share in shares[:3]]
    assert max(rows) - min(rows) <= 40


def test_engines_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:30000", "http://[::1]:30000", "http://localhost:1"):
        assert p2p._is_local(url)
    assert not p2p._is_local("http://192.0.2.7:30000")  # of no machine (RFC 5737)
    transport = object.__new__(p2p.P2PTransport)
    transport.layout = SimpleNamespace(rank=0)  # type: ignore[assignment]
    engine = EngineInfo(url="http://192.0.2.7:30000", num_gpus=1, gpu_offset=0)
    with pytest.raises(WeightSyncError, match=r"engine http://192\.0\.2\.7:30000 is not on .* one host only"):
        transport._open_store([engine], [], [])


def test_a_package_that_cannot_be_imported_is_named_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ImportError, match=r"--update-weight-p2p-backend nixl: .*pip install nixl nixl-cu12"):
        agents.make_agent("nixl")
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ImportError, match="pip install mooncake-transfer-engine-non-cuda"):
        agents.make_agent("mooncake")
