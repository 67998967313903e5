"""Changes in place, from the trainer to models that fuse, shard, cast and join what they load: without engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import save_file
from torch import nn

from slime.servers.types import EngineInfo
from slime.utils.structured_error import from_text
from slime.weight_sync.buckets import Bucket
from slime.weight_sync.fanout import WeightSyncError
from slime.weights.delta.codec import CorruptDeltaError
from slime.weights.delta.message import Message
from tests.support.engine_plugin import engine_plugin
from tests.support.in_place_run import InPlaceRun

SHAPES = {
    **{f"layer.{part}_proj.weight": (rows, 12) for part, rows in (("q", 16), ("k", 8), ("v", 8))},
    **{f"experts.{i}.{part}_proj.weight": (10, 12) for i in range(2) for part in ("gate", "up")},
    **{f"layer.{part}.weight": (6, 12) for part in ("q_a_proj", "kv_a_proj_with_mqa")},
    "embed.weight": (40, 12),
    "norm.weight": (12,),
    "scale": (),
    "nothing": (0, 4),
}


class Model(nn.Module):
    """Rank ``rank`` of two: loads as SGLang's models do, by copying parts of a tensor into parts of its parameters."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in {
            "qkv": (16, 12), "experts": (2, 10, 12), "joined": (12, 12), "embed": (20, 12), "norm": (12,), "scale": (1,)
        }.items():  # fmt: skip
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        waiting: dict[str, torch.Tensor] = {}
        for name, loaded in weights:
            if ".q_proj." in name or ".k_proj." in name or ".v_proj." in name:
                offset, rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[name.split("_proj")[0][-1]]
                self.qkv.data.narrow(0, offset, rows).copy_(loaded.narrow(0, self.rank * rows, rows))
            elif name.startswith("experts"):
                _, expert, part, _ = name.split(".")
                target = self.experts.data[int(expert)]
                half = target.narrow(0, 5 * (part == "up_proj"), 5)
                half.copy_(loaded.t()[:, self.rank * 5 : self.rank * 5 + 5].contiguous().t())
            elif "_a_proj" in name:
                waiting[name] = loaded
                if len(waiting) == 2:
                    self.joined.data.copy_(torch.cat([waiting[n] for n in sorted(waiting, reverse=True)]))
            elif name == "embed.weight":
                self.embed.data.copy_(loaded.chunk(2)[self.rank])
            elif name == "norm.weight":
                self.norm.data.copy_(loaded)
            elif name == "scale":
                self.scale.data[0] = loaded


class Transforming(Model):
    """Copies a function of what it has loaded."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.norm.data.copy_(-torch.exp(self.norm.data))


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    """The plug-in's module, with stand-ins for what it imports of SGLang."""

    def tensor_hash(tensor: torch.Tensor) -> int:
        return xxhash.xxh3_64_intdigest(tensor.contiguous().view(torch.uint8).numpy())

    with engine_plugin({"managers.mm_utils": {"tensor_hash": tensor_hash}}) as load:
        yield load("weights.changes")


class Group:
    """The process group of engines, each of two ranks: messages are taken at once."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        self.models: dict[str, list[Model]] = {}
        self.log: list[str] = []
        self.strike: Callable[[], None] | None = None

    def send(self, bucket: Bucket, *, weight_version: str | None, as_dtype: str | None = None) -> None:
        self.log.append("weights" if as_dtype is None else "changes")
        refused = []
        for model in (model for models in self.models.values() for model in models):
            try:
                if as_dtype is None:
                    model.load_weights(bucket.tensors)
                else:
                    self.plugin.take_message(model, bucket.tensors[0][1])
            except (self.plugin.RefusedError, CorruptDeltaError) as e:
                refused.append(str(e))
            if self.strike is not None:
                self.strike()
        if refused:
            raise WeightSyncError(f"not for this engine: {refused}", {"refused": True})

    def close(self) -> None:
        pass


class Engines(InPlaceRun):
    """A trainer and the engines that it pushes to."""

    def __init__(self, checkpoint: Path, patch: pytest.MonkeyPatch, plugin: Any, **flags: Any) -> None:
        super().__init__(checkpoint, patch, **flags)
        for name in SHAPES:  # in this order, not that of the file
            self.weights[name] = self.weights.pop(name)
        self.group = Group(plugin)
        patch.setattr(self.transport, "_group", self.group)
        self.version = self.sent = 0

    def add(self, name: str, kind: type[Model] = Model, dtype: torch.dtype = torch.bfloat16) -> None:
        self.group.models[name] = [kind(rank, dtype) for rank in range(2)]

    def sync(self) -> list[str]:
        """Push; return what was sent. Every engine has then what a new one has that loads everything."""
        self.transport._engines = [EngineInfo(name) for name in self.group.models]
        self.group.log.clear()
        source: Any = SimpleNamespace(model=self.weights, args=self.args)
        self.transport.prepare(source)
        self.sent = self.transport.send(source, weight_version=str(self.version + 1))
        self.version += 1
        self.check()
        return list(self.group.log)

    def check(self) -> None:
        for models in self.group.models.values():
            for model in models:
                fresh = type(model)(model.rank, model.norm.dtype)
                fresh.load_weights(self.weights.items())
                for (name, got), (_, expected) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
                    assert torch.equal(bits(got), bits(expected)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: Any) -> Callable[..., Engines]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return partial(Engines, tmp_path, monkeypatch, plugin)


@pytest.mark.parametrize("limit", [200, 1 << 20])
def test_changes_follow_all_weights(limit: int, make: Callable[..., Engines]) -> None:
    run = make(update_weight_buffer_size=limit)
    run.add("a")
    run.add("b", dtype=torch.float32)
    assert set(run.sync()[:-1]) == {"weights"}
    assert (run.transport.density, run.sent) == (1.0, sum(t.nbytes for t in run.weights.values()))
    for part in (0.05, 0.0, 0.1, 0.25, 0.02):
        before = {name: tensor.clone() for name, tensor in run.weights.items()}
        run.train(part)
        sent = run.sync()
        assert set(sent) == {"changes"}
        assert len(sent) == 1 or limit == 200
        changed = sum(int((bits(t) != bits(before[n])).sum()) * 2 for n, t in run.weights.items())
        assert run.transport.density == changed / sum(t.nbytes for t in run.weights.values())
    run.train(0.6)
    assert run.sync()[0] == "weights"  # more than 30 % changed
    assert run.transport.density == 1.0


def test_every_value_arrives(make: Callable[..., Engines]) -> None:
    """NaNs of any bits, infinities, both zeros; all ones are what says that nothing has changed."""
    run = make()
    run.add("a")
    run.sync()
    for pattern in (0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0xFFFE, 0xFFFF):
        for name in ("layer.q_proj.weight", "layer.q_a_proj.weight", "experts.1.up_proj.weight"):
            run.weights[name].view(torch.uint16)[1, 2] = pattern
        assert run.sync() == ["changes"], hex(pattern)
    run.train(0.05)  # what has been all ones stays so, or changes
    assert run.sync() == ["changes"]


def test_all_weights_are_due_at_intervals(make: Callable[..., Engines]) -> None:
    run = make(update_weight_delta_full_interval=2)
    run.add("a")
    kinds = []
    for _ in range(5):
        run.train(0.05)
        kinds.append(run.sync()[0])
    assert kinds == ["weights", "changes", "weights", "changes", "weights"]


def test_engines_with_other_weights_are_sent_all(make: Callable[..., Engines]) -> None:
    """A late one, one that lost its weights, one whose weights something else has changed, another trainer's."""
    run = make()
    run.add("a")
    run.sync()
    run.add("late")
    run.train(0.05)
    assert run.sync()[0] == "weights"
    run.add("late")  # started again, where it was
    run.train(0.05)
    assert run.sync()[:2] == ["changes", "weights"]
    run.group.models["a"][1].embed.data[3, 4] += 1
    run.train(0.05)
    assert run.sync()[:2] == ["changes", "weights"]
    other = make()
    other.group.models = run.group.models
    other.train(0.01)
    assert other.sync()[0] == "weights"
    run.train(0.05)
    assert run.sync()[:2] == ["changes", "weights"]
    run.train(0.05)
    assert run.sync() == ["changes"]


@pytest.mark.parametrize("after", range(8))
def test_a_push_that_ends_half_way_is_followed_by_all_weights(after: int, make: Callable[..., Engines]) -> None:
    run = make(update_weight_buffer_size=200)
    run.add("a")
    run.add("b")
    run.sync()
    run.train(0.1)
    taken = 0

    def strike() -> None:
        nonlocal taken
        taken += 1
        if taken > after:
            raise WeightSyncError("an engine has ended")

    run.group.strike = strike
    with pytest.raises(WeightSyncError, match="has ended"):
        run.sync()
    run.group.strike = None
    assert run.sync()[0] == "weights"
    run.train(0.1)
    assert set(run.sync()) == {"changes"}


def test_a_model_that_does_more_than_to_copy_is_sent_all(
    make: Callable[..., Engines], caplog: pytest.LogCaptureFixture
) -> None:
    run = make()
    run.add("a")
    run.add("b", Transforming)
    sent = run.sync()
    assert sent == ["weights", "changes", "weights"]  # what was tried changed them
    assert "Transforming does more with a weight" in caplog.text
    run.train(0.05)
    assert run.sync() == ["weights"]


def test_messages_out_of_order_or_damaged_are_refused(make: Callable[..., Engines], plugin: Any) -> None:
    run = make(update_weight_buffer_size=200)
    run.add("a")
    run.sync()
    (model, _), messages = run.group.models["a"], []
    send = run.group.send
    run.group.send = lambda bucket, **more: messages.append(bucket.tensors[0][1])  # type: ignore[method-assign]
    run.train(0.1)
    source: Any = SimpleNamespace(model=run.weights, args=run.args)
    run.transport.prepare(source)
    run.transport.send(source, weight_version="2")
    run.group.send = send  # type: ignore[method-assign]
    assert len(messages) > 2
    with pytest.raises(plugin.RefusedError, match="expected changes towards version None, found 2 of run"):
        plugin.take_message(model, messages[1])
    broken = messages[0].clone()
    broken[-1] ^= 1
    with pytest.raises(CorruptDeltaError, match="expected bytes of xxh3-128"):
        plugin.take_message(model, broken)
    with pytest.raises(CorruptDeltaError, match="are no changes of weights"):
        Message.unpack(memoryview(b"\x05\0\0\0\0\0\0\0{}"))
    for message in messages:
        plugin.take_message(model, message)
    with pytest.raises(plugin.RefusedError, match="expected weights of version 1 of run"):
        plugin.take_message(model, messages[0])


def test_a_weight_of_another_shape_is_named(make: Callable[..., Engines]) -> None:
    run = make()
    run.add("a")
    run.sync()
    run.weights["norm.weight"] = run.weights["norm.weight"][:5]
    with pytest.raises(WeightSyncError, match=r"norm\.weight was Part\(.*\(12,\).*and is .*\(5,\)"):
        run.sync()


class Engine:
    """The parts of SGLang's scheduler through which a broadcast goes; ``draft_path``: of its draft model."""

    def __init__(self, plugin: Any, draft_path: str | None, patch: pytest.MonkeyPatch) -> None:
        self.plugin, self.drafts = plugin, sys.modules["slime_engine_plugin.weights.drafts"]
        self.target, self.draft = Model(0, torch.bfloat16), Model(0, torch.bfloat16)
        args = SimpleNamespace(model_path="/m", speculative_draft_model_path=draft_path)
        worker = SimpleNamespace(draft_runners=[SimpleNamespace(model=self.draft)])
        self.manager = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.target), server_args=args),
            draft_worker=SimpleNamespace(draft_worker=worker),
        )
        self.updater = SimpleNamespace(
            get_model=lambda: self.target,
            device="cpu",
            _assert_weight_cache_inactive=lambda what: None,
            _model_update_group={"slime": "group"},
        )
        self.sent: Any = None
        distributed = ModuleType("sglang.srt.distributed")
        vars(distributed)["get_tp_group"] = lambda: SimpleNamespace(world_size=1)
        patch.setitem(sys.modules, distributed.__name__, distributed)
        patch.setattr(plugin.dist, "broadcast", lambda tensor, src, group: tensor.copy_(self.sent))

    def send(self, bucket: Bucket, *, weight_version: str | None, as_dtype: str | None = None) -> None:
        self.drafts.note_own_drafts(self.manager, None)
        self.sent = bucket.tensors[0][1]

        def stock(updater: Any, *request: Any) -> tuple[bool, str]:
            updater.get_model().load_weights(iter(bucket.tensors))
            return True, "Success"

        dtypes = [as_dtype or "bfloat16"]
        done, why = self.plugin.take(stock, self.updater, bucket.names, dtypes, [list(self.sent.shape)], "slime", None)
        if not done:
            raise WeightSyncError(*from_text(why))


@pytest.mark.parametrize("draft_path", [None, "/m", "/draft"])
def test_draft_layers_of_the_model_follow_and_a_draft_model_of_its_own_does_not(
    draft_path: str | None, make: Callable[..., Engines], plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    engine = Engine(plugin, draft_path, monkeypatch)
    run.transport._group = engine  # type: ignore[assignment]
    run.group.models = {"a": [engine.target] if draft_path == "/draft" else [engine.target, engine.draft]}
    run.sync()
    run.train(0.05)
    run.sync()
    assert run.transport.density < 0.3
    assert "load_weights" not in vars(engine.target)
    if draft_path == "/draft":
        assert all(not parameter.any() for parameter in engine.draft.parameters())


def test_a_message_that_is_not_taken_is_answered_and_ends_nothing(
    make: Callable[..., Engines], plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    engine = Engine(plugin, None, monkeypatch)
    run.transport._group = engine  # type: ignore[assignment]
    bucket = Bucket((("x", torch.frombuffer(bytearray(b"no message"), dtype=torch.uint8)),), is_last=True)
    with pytest.raises(WeightSyncError, match="this engine: rank 0: CorruptDeltaError") as e:
        engine.send(bucket, weight_version=None, as_dtype=plugin.DTYPE)
    assert e.value.data == {"refused": True}
