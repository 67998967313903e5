"""The driver's calls to the rollout manager and to the trainers: waited for by name, metrics taken in, deaths seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.observability import tracking
from slime.observability.tracking import Tracker
from slime.ray import remote
from slime.ray.driver import rollout_handle, train_group, weight_push
from slime.ray.driver.rollout_handle import RolloutHandle
from slime.ray.driver.train_group import RayTrainGroup
from slime.ray.remote import EngineDied, EnginesNeedWeights, RemoteFailure
from slime.servers.types import EngineInfo
from tests.support.arguments import parse, run_args
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
    for module in (remote, rollout_handle):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(remote, "time", fake)
    monkeypatch.setattr(tracking, "_tracker", Tracker())
    return fake


def handle_args(**changes: Any) -> Any:
    base = {
        "run_dir": "/nowhere",
        "engine_ready_timeout": 100.0,
        "weight_sync_timeout": 10.0,
        "start_rollout_id": None,
        "data_source_path": "slime.rollout.data_source.RolloutDataSource",
    }
    args = run_args(**{**base, **changes})
    args.device_type = "cpu"
    return args


RECORD = {"step_key": "rollout/step", "step": 0, "name": "rollout/x", "value": 1.0, "time": 0.0}


def test_every_answer_brings_its_metrics(clock: FakeRay) -> None:
    manager = Remote(generate=Ref("boxes", at=5), drain_records=Ref([RECORD]))
    handle = RolloutHandle(handle_args(), manager)
    started = handle.start_generate(3)
    assert clock.now == 0  # at once
    assert handle.wait_generate(started, 3) == "boxes"
    assert handle.wait_generate(started, 3) == "boxes"  # again
    assert tracking.drain() == [RECORD, RECORD]


def test_a_failing_rollout_names_the_rollout(clock: FakeRay) -> None:
    manager = Remote(generate=Ref(RemoteFailure("ValueError: reward is nan"), at=1))
    handle = RolloutHandle(handle_args(), manager)
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
        call(RolloutHandle(handle_args(), manager))
    assert clock.now == 2


def test_engines_that_never_get_ready_have_a_deadline(clock: FakeRay) -> None:
    manager = Remote(get_updatable_engines=Ref(at=NEVER))
    with pytest.raises(TimeoutError, match="starting the engines: no answer from the rollout manager within 200 s"):
        RolloutHandle(handle_args(), manager).wait_ready()


def test_engines_are_prepared_before_trainers_take_memory(clock: FakeRay) -> None:
    manager = Remote()
    RolloutHandle(handle_args(check_weight_update_equal=True, offload_rollout=True), manager).prepare_engines()
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
    RolloutHandle(handle_args(), Remote(check_weights=[{"a": 1}, {"a": 1}])).check_equal_checksums()
    with pytest.raises(RuntimeError, match="different weights"):
        RolloutHandle(handle_args(), Remote(check_weights=[{"a": 1}, {"a": 2}])).check_equal_checksums()


def test_engines_of_other_sizes_hold_other_parts(clock: FakeRay) -> None:
    def checksum(tp_size: int, text: str) -> dict[str, Any]:
        ranks = [{"parallelism_info": {"tp_rank": i, "tp_size": tp_size}, "sum": text} for i in range(tp_size)]
        return {"ranks": ranks, "per_engine_checksum": text}

    found = [checksum(2, "x"), checksum(1, "y"), checksum(1, "y")]
    RolloutHandle(handle_args(), Remote(check_weights=found)).check_equal_checksums()
    with pytest.raises(RuntimeError, match="different weights"):
        RolloutHandle(handle_args(), Remote(check_weights=[*found, checksum(2, "z")])).check_equal_checksums()


def test_the_end_does_not_wait_forever(clock: FakeRay) -> None:
    RolloutHandle(handle_args(), Remote(dispose=Ref(at=NEVER))).dispose()
    assert clock.now == rollout_handle.DISPOSE_DEADLINE_S


def make_group(ranks: list[Remote], manager: Remote | None = None, **flags: Any) -> RayTrainGroup:
    group = RayTrainGroup(handle_args(**flags), 1, len(ranks), (None, [0] * len(ranks), [0] * len(ranks)))
    group._actors = ranks
    if manager is not None:
        group.set_rollout_manager(manager)
    return group


@pytest.fixture
def one_node(clock: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group, "ray", SimpleNamespace(nodes=lambda: [{"NodeID": "a", "Alive": True}]))


def test_collectives_of_trainers_start_before_what_they_overlap_with(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"

    def environment(device_type: str = "cuda", **flags: Any) -> str | None:
        group = make_group([], **flags)
        group.args.device_type = device_type
        return group._environment().get(name)

    monkeypatch.delenv(name, raising=False)
    assert environment(tensor_model_parallel_size=2) == environment(context_parallel_size=2) == "1"
    assert environment() is environment("cpu", tensor_model_parallel_size=2) is None
    assert environment(tensor_model_parallel_size=2, train_env_vars={name: "8"}) == "8"
    monkeypatch.setenv(name, "32")
    assert environment(tensor_model_parallel_size=2) == "32"


@pytest.mark.usefixtures("one_node")
def test_ranks_meet_and_tell_the_manager_their_layout() -> None:
    found = [None, [-1.5, -2.5]]  # the last pipeline stage has them
    ranks = [Remote(master=("127.0.0.1", 20001), setup=(3, {"dp_size": 2}), canary=values) for values in found]
    manager = Remote()
    group = RayTrainGroup(handle_args(), 1, 2, (None, [0, 1], [0, 1]), with_ref=True)
    group._actors = ranks  # type: ignore[assignment]
    assert group.create(manager) == 3
    assert ranks[0].calls[0] == ("master", True)  # one node: loopback
    assert all(("setup", ("127.0.0.1", 20001), True) in rank.calls for rank in ranks)
    assert ("set_train_parallel_config", {"dp_size": 2}) in manager.calls
    assert group.canary == [-1.5, -2.5]


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


@pytest.mark.parametrize(
    ("step", "fetched"),
    [
        (lambda group: group.update_weights(), ["rollout/x", "rollout/of the manager"]),
        (lambda group: group.save_model(0), ["rollout/x"]),  # a critic pushes no weights
    ],
)
def test_metrics_are_fetched_for_drivers_that_wait_themselves(
    clock: FakeRay, step: Callable[[RayTrainGroup], Any], fetched: list[str]
) -> None:
    """With ``ray.get``, as those of slime <= 0.3.1: trackers show the run while it lasts, also when it is killed."""
    manager = Remote(get_updatable_engines=[], drain_records=Ref([{**RECORD, "name": "rollout/of the manager"}]))
    step(make_group([Remote(drain_records=Ref([RECORD]))], manager))
    assert [record["name"] for record in tracking.drain()] == fetched


def test_the_manager_learns_which_training_made_the_weights(clock: FakeRay) -> None:
    """Drivers of slime <= 0.3.1 do not say it, and without it no token is too old for ``--max-staleness``."""
    manager = Remote(get_updatable_engines=["engine 0"])
    rank = Remote(update_weights=Ref(7))
    group = make_group([rank], manager, start_rollout_id=3)
    group.update_weights()
    rank.answers["update_weights"] = Ref(8)  # the same weights again, or those of a rollout for the critic alone
    group.update_weights()
    group.async_train(3, [])
    rank.answers["update_weights"] = Ref(9)
    group.update_weights()
    assert [call for call in manager.calls if call[0] == "weights_updated"] == [
        ("weights_updated", 7, 3),
        ("weights_updated", 9, 4),
    ]


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
    # Lost engines are restarted before, and get requests after.
    assert manager.names[-3:] == [
        "recover_updatable_engines",
        "get_updatable_engines",
        "clear_updatable_num_new_engines",
    ]


class Failing(Remote):
    """A rank whose first pushes fail."""

    def __init__(self, failures: int) -> None:
        super().__init__(update_weights=5)
        self.failures = failures

    def __getattr__(self, name: str) -> Any:
        if name == "update_weights":
            self.failures -= 1
            failure = RemoteFailure("WeightSyncError: http://e1 did not pause")
            self.answers[name] = Ref(failure if self.failures >= 0 else 5)
        return super().__getattr__(name)


class Losing(Remote):
    """A manager that answers the question for its engines in turn, the last one forever."""

    def __init__(self, *answers: list[EngineInfo]) -> None:
        super().__init__()
        self.lists = list(answers)

    def __getattr__(self, name: str) -> Any:
        if name == "get_updatable_engines":
            self.answers[name] = Ref(self.lists.pop(0) if len(self.lists) > 1 else self.lists[0])
        return super().__getattr__(name)


PAIR = [EngineInfo(f"http://e{rank}", rank=rank) for rank in range(2)]


def test_a_push_that_fails_with_an_engine_is_made_again_without_it(clock: FakeRay, caplog: Any) -> None:
    ranks = [Failing(1), Failing(1)]
    manager = Losing(PAIR, PAIR[:1])
    assert make_group(ranks, manager).update_weights() == 5
    assert [call[1] for call in ranks[1].calls if call[0] == "update_weights"] == [PAIR, PAIR[:1]]
    assert manager.names == [
        "recover_updatable_engines",
        "get_updatable_engines",
        "mark_unreachable_engines_dead",
        "get_updatable_engines",
        "recover_updatable_engines",
        "get_updatable_engines",
        "clear_updatable_num_new_engines",
    ]
    assert "retrying the weight push without engine 1: WeightSyncError: http://e1 did not pause" in caplog.text


def test_a_push_that_fails_while_all_engines_answer_is_a_failure(clock: FakeRay) -> None:
    manager = Losing(PAIR)
    with pytest.raises(RemoteFailure, match="WeightSyncError: http://e1 did not pause"):
        make_group([Failing(1)], manager).update_weights()
    assert "clear_updatable_num_new_engines" not in manager.names


def test_engines_that_die_in_every_push_end_the_run(clock: FakeRay) -> None:
    lives = [[EngineInfo(f"http://e0:{port}")] for port in range(2 * weight_push.PUSH_ATTEMPTS)]
    rank = Failing(100)
    with pytest.raises(RemoteFailure, match="did not pause"):
        make_group([rank], Losing(*lives)).update_weights()
    assert rank.names == ["update_weights"] * weight_push.PUSH_ATTEMPTS


class Needy(Remote):
    """A manager whose engines need weights at certain times while it generates, by ``clock``."""

    def __init__(self, clock: FakeRay, moments: list[float], **answers: Any) -> None:
        super().__init__(**answers)
        self.clock, self.moments, self.in_need = clock, moments, True

    def __getattr__(self, name: str) -> Any:
        if name == "wait_until_weights_needed":
            at = self.moments.pop(0) if self.moments else NEVER
            self.answers[name] = Ref(EnginesNeedWeights("every engine was lost"), at=at)
        if name == "needs_weights":
            self.answers[name] = Ref(self.in_need, at=self.clock.now)
        return super().__getattr__(name)


@pytest.mark.parametrize("what", ["generate", "eval"])
def test_engines_that_are_restarted_in_a_rollout_get_their_weights(clock: FakeRay, what: str) -> None:
    manager = Needy(clock, [3.0, 7.0], generate=Ref("boxes", at=20), eval=Ref(None, at=20))
    handle = RolloutHandle(handle_args(use_fault_tolerance=True), manager)
    pushed: list[float] = []
    handle.supply_weights = lambda: pushed.append(clock.now)
    if what == "generate":
        assert handle.wait_generate(handle.start_generate(0), 0) == "boxes"
    else:
        handle.eval(0)
    assert pushed == [3.0, 7.0]
    assert manager.names.count("wait_until_weights_needed") == 3


def test_a_source_of_one_s_own_is_saved_when_the_rollout_that_holds_it_is_done(clock: FakeRay) -> None:
    manager = Needy(clock, [3.0], save=Ref(None, at=950))
    handle = RolloutHandle(handle_args(use_fault_tolerance=True, data_source_path="my.Source"), manager)
    pushed: list[float] = []
    handle.supply_weights = lambda: pushed.append(clock.now)
    handle.save(0)
    assert pushed == [3.0]
    built_in = RolloutHandle(handle_args(), Needy(clock, [], save=Ref(None, at=10000)))
    with pytest.raises(TimeoutError, match="saving the prompts' state of rollout 0"):
        built_in.save(0)


def test_a_need_that_the_regular_push_has_met_is_none(clock: FakeRay) -> None:
    manager = Needy(clock, [3.0], generate=Ref("boxes", at=20))
    manager.in_need = False
    handle = RolloutHandle(handle_args(use_fault_tolerance=True), manager)
    pushed: list[float] = []
    handle.supply_weights = lambda: pushed.append(clock.now)
    assert handle.wait_generate(handle.start_generate(0), 0) == "boxes"
    assert pushed == []


def test_without_the_flag_nothing_waits_for_a_need(clock: FakeRay) -> None:
    manager = Needy(clock, [3.0], generate=Ref("boxes", at=20))
    handle = RolloutHandle(handle_args(use_fault_tolerance=False), manager)
    handle.supply_weights = lambda: pytest.fail("weights were pushed")
    assert handle.wait_generate(handle.start_generate(0), 0) == "boxes"
    assert "wait_until_weights_needed" not in manager.names


def test_without_engines_the_ranks_still_hear_of_a_sync(clock: FakeRay) -> None:
    ranks = [Remote(), Remote()]
    group = make_group(ranks, Remote(), debug_train_only=True, keep_old_actor=True)
    assert group.update_weights(synchronous_loop=False) is None
    assert [rank.names for rank in ranks] == [["weights_synced"]] * 2
    assert ranks[0].calls[-1] == ("weights_synced", False)


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
    group.save_model(6, force_sync=True, keep=False)
    group.finish_saving()
    group.offload()
    group.onload()
    group.clear_memory()
    group.finish()
    for rank in ranks:
        saves = [call for call in rank.calls if call[0] == "save"]
        assert saves == [("save", 5, True, True), ("save", 6, True, False)]
        assert rank.names[2:] == ["finish_saving", "sleep", "wake_up", "clear_memory", "finish"]


def test_too_few_slots_are_noticed_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_group.cluster, "current", lambda: None)
    with pytest.raises(ValueError, match="actor: 4 ranks do not fit on 3 slots"):
        RayTrainGroup(handle_args(), 2, 2, (None, [0, 1, 2], [0, 1, 2])).launch()


def test_trainers_get_the_users_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", raising=False)
    group = RayTrainGroup(handle_args(train_env_vars={"MINE": 3, "NCCL_CUMEM_ENABLE": "2"}), 1, 1, (None, [0], [0]))
    assert group._environment() == {
        "NCCL_CUMEM_ENABLE": "2",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        "MINE": "3",
    }
    group.args.train_env_vars = None
    assert group._environment()["NCCL_CUMEM_ENABLE"] == "1"
    group.args.use_routing_replay = True
    assert group._environment()["ENABLE_ROUTING_REPLAY"] == "1"


@pytest.mark.parametrize(
    ("flags", "threads", "expected"),
    [
        ({"generates_while_training": False}, None, True),  # train.py
        ({"generates_while_training": True}, None, False),  # train_async.py
        ({}, None, False),  # a driver of the user's own, which may overlap
        ({"colocate": True}, None, True),
        ({"offload_rollout": True}, None, True),
        ({"debug_train_only": True}, None, True),
        ({"debug_train_only": True}, "4", False),
        ({"debug_train_only": True, "train_env_vars": {"OMP_NUM_THREADS": 1}}, None, False),
    ],
)
def test_ranks_take_the_cores_that_engines_leave_them(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], threads: str | None, expected: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    group = RayTrainGroup(handle_args(), 1, 1, (None, [0], [0]))
    vars(group.args).update(flags)
    assert group._has_cores_to_itself() == expected


def test_a_rank_that_is_gone_when_it_is_released_is_named(clock: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(train_group, "end_actors", lambda actors, where: ended.append((actors, where)))
    ranks = [Remote(process_location=("node", 1)), Remote(process_location=Ref(RemoteFailure("OSError: gone"), at=1))]
    with pytest.raises(RemoteFailure, match=r"(?s)OSError: gone.*actor rank 1, during releasing the actor"):
        make_group(ranks).release()
    ranks[1].answers["process_location"] = ("node", 2)
    group = make_group(ranks)
    group.release()
    group.release()  # nothing is left to end
    assert ended == [(ranks, [("node", 1), ("node", 2)])]


def test_the_driver_tells_how_an_evaluation_went(clock, caplog):
    handle = RolloutHandle(handle_args(use_fault_tolerance=False), Remote(eval=["sums: mean reward 0.75, 4 samples"]))
    with caplog.at_level("INFO"):
        handle.eval(7)
    assert caplog.messages == ["evaluation at rollout 7: sums: mean reward 0.75, 4 samples"]
