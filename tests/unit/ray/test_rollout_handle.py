"""The driver's calls to the rollout manager and to the trainers: waited for by name, metrics taken in, deaths seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.observability import tracking
from slime.observability.tracking import Tracker
from slime.ray import rollout_handle, train_group, waiting
from slime.ray.errors import EngineDied, RemoteFailure
from slime.ray.rollout_handle import RolloutHandle
from slime.ray.train_group import RayTrainGroup
from tests.support.arguments import parse
from tests.support.fake_ray import NEVER, FakeRay, Ref


class Remote:
    """An actor handle: a method answers with what ``answers`` has for it, a value or a reference."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"wait_for_failure": Ref(at=NEVER), "drain_records": Ref([]), **answers}
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Ref:
            self.calls.append((name, *args))
            answer = self.answers.get(name)
            return answer if isinstance(answer, Ref) else Ref(answer)

        return SimpleNamespace(remote=call)

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls if call[0] not in ("wait_for_failure", "drain_records")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for module in (waiting, rollout_handle):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(waiting, "time", fake)
    monkeypatch.setattr(tracking, "_tracker", Tracker())
    return fake


def run_args(**changes: Any) -> Any:
    base = {
        "run_dir": "/nowhere",
        "engine_ready_timeout": 100.0,
        "weight_sync_timeout": 10.0,
        "check_weight_update_equal": False,
        "offload_rollout": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
    }
    return SimpleNamespace(**{**base, **changes})


RECORD = {"step_key": "rollout/step", "step": 0, "name": "rollout/x", "value": 1.0, "time": 0.0}


def test_every_answer_brings_its_metrics(clock: FakeRay) -> None:
    manager = Remote(generate=Ref("boxes", at=5), drain_records=Ref([RECORD]))
    handle = RolloutHandle(run_args(), manager)
    started = handle.start_generate(3)
    assert clock.now == 0  # at once
    assert handle.wait_generate(started, 3) == "boxes"
    assert handle.wait_generate(started, 3) == "boxes"  # again
    assert tracking.drain() == [RECORD, RECORD]


def test_a_failing_rollout_names_the_rollout(clock: FakeRay) -> None:
    manager = Remote(generate=Ref(RemoteFailure("ValueError: reward is nan"), at=1))
    handle = RolloutHandle(run_args(), manager)
    with pytest.raises(RemoteFailure) as failed:
        handle.wait_generate(handle.start_generate(3), 3)
    assert str(failed.value).startswith(
        "ValueError: reward is nan\n  in the rollout manager, during generating rollout 3"
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda handle: handle.wait_generate(handle.start_generate(0), 0),
        lambda handle: handle.eval(0),
        lambda handle: handle.save(0),
        lambda handle: handle.offload(),
        lambda handle: handle.wait_ready(),
    ],
)
def test_an_engine_that_dies_ends_every_wait(clock: FakeRay, call: Callable[[RolloutHandle], Any]) -> None:
    never = {
        name: Ref(at=NEVER)
        for name in ("generate", "eval", "save", "offload", "get_updatable_engines", "check_weights")
    }
    manager = Remote(wait_for_failure=Ref(EngineDied("engine 1 exited with -9"), at=2), **never)
    with pytest.raises(EngineDied, match="engine 1 exited with -9"):
        call(RolloutHandle(run_args(), manager))
    assert clock.now == 2


def test_engines_that_never_get_ready_have_a_deadline(clock: FakeRay) -> None:
    manager = Remote(get_updatable_engines=Ref(at=NEVER))
    with pytest.raises(TimeoutError, match="starting the engines: no answer from the rollout manager within 200 s"):
        RolloutHandle(run_args(), manager).wait_ready()


def test_engines_are_prepared_before_trainers_take_memory(clock: FakeRay) -> None:
    manager = Remote()
    RolloutHandle(run_args(check_weight_update_equal=True, offload_rollout=True), manager).prepare_engines()
    assert [c for c in manager.calls if c[0] in ("get_updatable_engines", "check_weights", "offload")] == [
        ("get_updatable_engines",),
        ("check_weights", "snapshot"),
        ("check_weights", "reset_tensors"),
        ("offload",),
    ]


def test_weights_are_not_reset_where_nothing_restores_them() -> None:
    with pytest.raises(ArgumentError, match=r"--check-weight-update-equal .* --debug-rollout-only"):
        parse("--debug-rollout-only", "--check-weight-update-equal")


def test_different_checksums_end_the_run(clock: FakeRay) -> None:
    RolloutHandle(run_args(), Remote(check_weights=[{"a": 1}, {"a": 1}])).check_equal_checksums()
    with pytest.raises(RuntimeError, match="different weights"):
        RolloutHandle(run_args(), Remote(check_weights=[{"a": 1}, {"a": 2}])).check_equal_checksums()


def test_the_end_does_not_wait_for_ever(clock: FakeRay) -> None:
    RolloutHandle(run_args(), Remote(dispose=Ref(at=NEVER))).dispose()
    assert clock.now == rollout_handle.DISPOSE_DEADLINE_S


def make_group(ranks: list[Remote], manager: Remote | None = None, **flags: Any) -> RayTrainGroup:
    group = RayTrainGroup(run_args(**flags), 1, len(ranks), (None, [0] * len(ranks), [0] * len(ranks)))
    group._actors = ranks
    if manager is not None:
        group.set_rollout_manager(manager)
    return group


@pytest.fixture
def one_node(clock: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group, "ray", SimpleNamespace(nodes=lambda: [{"NodeID": "a", "Alive": True}]))


@pytest.mark.usefixtures("one_node")
def test_ranks_meet_and_tell_the_manager_their_layout() -> None:
    ranks = [Remote(master=("127.0.0.1", 20001), setup=(3, {"dp_size": 2})) for _ in range(2)]
    manager = Remote()
    group = RayTrainGroup(run_args(), 1, 2, (None, [0, 1], [0, 1]), with_ref=True)
    group._actors = ranks  # type: ignore[assignment]
    assert group.create(manager) == 3
    assert ranks[0].calls[0] == ("master", True)  # one node: loopback
    assert all(("setup", ("127.0.0.1", 20001), True) in rank.calls for rank in ranks)
    assert ("set_train_parallel_config", {"dp_size": 2}) in manager.calls


@pytest.mark.usefixtures("one_node")
def test_ranks_that_loaded_different_checkpoints_are_refused() -> None:
    ranks = [Remote(master=("127.0.0.1", 20001), setup=(start, {})) for start in (3, 0)]
    with pytest.raises(RuntimeError, match=r"different checkpoints: their next rollouts are \[0, 3\].*--load"):
        make_group(ranks).create()


def test_training_starts_on_every_rank_at_once_and_collects_metrics(clock: FakeRay) -> None:
    ranks = [Remote(train=Ref({"rank": r}, at=5 - r), drain_records=Ref([RECORD] if r else [])) for r in range(2)]
    group = make_group(ranks)
    refs = group.async_train(7, ["shard 0", "shard 1"])
    assert clock.now == 0
    assert [rank.calls for rank in ranks] == [[("train", 7, ["shard 0", "shard 1"], None)]] * 2
    assert group.wait(refs, "training on rollout 7") == [{"rank": 0}, {"rank": 1}]
    assert tracking.drain() == [RECORD]


def test_each_rank_gets_its_own_external_data(clock: FakeRay) -> None:
    ranks = [Remote(), Remote()]
    make_group(ranks).async_train(0, [], ["values 0", "values 1"])
    assert [rank.calls[0][3] for rank in ranks] == ["values 0", "values 1"]
    with pytest.raises(ValueError, match="zip"):
        make_group(ranks).async_train(0, [], ["values 0"])


def test_a_failing_rank_is_named_with_what_it_did(clock: FakeRay) -> None:
    ranks = [Remote(train=Ref(at=NEVER)), Remote(train=Ref(RemoteFailure("ValueError: bad mask"), at=1))]
    group = make_group(ranks)
    with pytest.raises(RemoteFailure) as failed:
        group.wait(group.async_train(7, []), "training on rollout 7")
    assert str(failed.value).startswith("ValueError: bad mask\n  in actor rank 1, during training on rollout 7")
    assert "actor_rank1.log" in str(failed.value)


def test_weights_go_to_the_engines_of_the_manager(clock: FakeRay) -> None:
    ranks = [Remote(update_weights=4), Remote(update_weights=4)]
    manager = Remote(get_updatable_engines=["engine 0", "engine 1"])
    assert make_group(ranks, manager).update_weights(synchronous_loop=False) == 4
    assert all(rank.calls[-1] == ("update_weights", ["engine 0", "engine 1"], False) for rank in ranks)


@pytest.mark.parametrize("flags", [{"debug_train_only": True}, {"debug_rollout_only": True}, {}])
def test_without_engines_no_weights_are_pushed(clock: FakeRay, flags: dict[str, bool]) -> None:
    ranks = [Remote()]
    assert make_group(ranks, Remote(get_updatable_engines=[]), **flags).update_weights() is None
    assert make_group(ranks).update_weights() is None
    assert ranks[0].names == []


def test_a_push_that_hangs_has_a_deadline(clock: FakeRay) -> None:
    ranks = [Remote(update_weights=1), Remote(update_weights=Ref(at=NEVER))]
    group = make_group(ranks, Remote(get_updatable_engines=["engine 0"]))
    with pytest.raises(TimeoutError, match="pushing weights: no answer from actor rank 1 within 40 s"):
        group.update_weights()


def test_saving_and_memory_reach_every_rank(clock: FakeRay) -> None:
    ranks = [Remote(), Remote()]
    group = make_group(ranks)
    group.save_model(5, force_sync=True)
    group.offload()
    group.onload()
    group.clear_memory()
    group.finish()
    for rank in ranks:
        assert ("save", 5, True) in rank.calls
        assert rank.names == ["save", "sleep", "wake_up", "clear_memory", "finish"]


def test_too_few_slots_are_noticed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group.cluster, "current", lambda: None)
    with pytest.raises(ValueError, match="actor: 4 ranks do not fit on 3 slots"):
        RayTrainGroup(run_args(), 2, 2, (None, [0, 1, 2], [0, 1, 2])).launch()


def test_trainers_get_the_users_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", raising=False)
    group = RayTrainGroup(run_args(train_env_vars={"MINE": 3, "NCCL_CUMEM_ENABLE": "2"}), 1, 1, (None, [0], [0]))
    assert group._environment() == {
        "NCCL_CUMEM_ENABLE": "2",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "MINE": "3",
    }
    group.args.train_env_vars = None
    assert group._environment()["NCCL_CUMEM_ENABLE"] == "1"
