"""The rollout manager without Ray: what a rollout leaves behind, exact snapshots, and engines that die."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.observability import tracking
from slime.observability.tracking import Tracker
from slime.ray import engine_control, rollout_manager
from slime.ray.errors import EngineDied, EnginesNeedWeights, RemoteFailure
from slime.ray.rollout_manager import RolloutManager
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.servers.types import EngineInfo
from slime.utils import async_utils
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

HERE = __name__
PATIENCE_S = 20.0


class Source:
    """A data source whose whole state is how many groups it has handed out; it snapshots as the built-in one does."""

    def __init__(self, args: Any) -> None:
        self.args, self.drawn = args, 0
        self.snapshots: dict[int, int] = {}

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            number = self.drawn
            self.drawn += 1
            n = self.args.n_samples_per_prompt
            groups.append([Sample(group_index=number, index=number * n + i, prompt=f"p{number}") for i in range(n)])
        return groups

    def snapshot(self, rollout_id: int) -> None:
        self.snapshots[rollout_id] = self.drawn

    def save(self, rollout_id: int) -> None:
        write_state(self.args.save, rollout_id, self.snapshots[rollout_id])

    def load(self, rollout_id: int | None = None) -> None:
        path = state_path(self.args.load, rollout_id) if self.args.load else None
        if path is not None and path.exists():
            self.drawn = json.loads(path.read_text())

    def __len__(self) -> int:
        return 10


class ForgetfulSource(Source):
    """One that only knows the present."""

    snapshot = None  # type: ignore[assignment]

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        del self.snapshots

    def __getattribute__(self, name: str) -> Any:
        if name == "snapshot":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def save(self, rollout_id: int) -> None:
        write_state(self.args.save, rollout_id, self.drawn)


def state_path(root: str, rollout_id: int | None) -> Path:
    return Path(root) / f"drawn_{rollout_id}.json"


def write_state(root: str, rollout_id: int, drawn: int) -> None:
    Path(root).mkdir(parents=True, exist_ok=True)
    state_path(root, rollout_id).write_text(json.dumps(drawn))


def answer(sample: Sample) -> Sample:
    sample.tokens = [7, int(sample.prompt[1:]), 9]  # type: ignore[arg-type]
    sample.response_length = 1
    sample.reward = float((sample.index or 0) % 2)
    sample.status = Sample.Status.COMPLETED
    return sample


def generate(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    if evaluation:
        samples = [answer(Sample(prompt="p3", index=0)), answer(Sample(prompt="p4", index=1))]
        return {"held_out": {"rewards": [s.reward for s in samples], "truncated": [False, True], "samples": samples}}
    groups = source.get_samples(args.rollout_batch_size)
    gate = args.gates.get(rollout_id)
    if gate is not None:  # the prompts are drawn, the answers are not there yet
        gate.drawn.set()
        assert gate.go.wait(PATIENCE_S)
    groups = [[answer(sample) for sample in group] for group in groups]
    return RolloutFnTrainOutput(groups, {"rollout/dropped": 3})


class Gate:
    def __init__(self) -> None:
        self.drawn, self.go = threading.Event(), threading.Event()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutManager]:
    monkeypatch.setattr(tracking, "_tracker", Tracker())
    monkeypatch.setattr(rollout_manager.worker, "begin", lambda args, name: tmp_path / f"{name}.log")
    monkeypatch.setattr(rollout_manager, "ray", SimpleNamespace(put=lambda shard: shard))
    monkeypatch.setattr(rollout_manager, "leave_out_what_is_loaded", lambda: None)  # not in the process of the tests

    def build(**changes: Any) -> RolloutManager:
        base: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "save": str(tmp_path / "save"),
            "load": None,
            "data_source_path": f"{HERE}.Source",
            "rollout_function_path": f"{HERE}.generate",
            "eval_function_path": f"{HERE}.generate",
            "custom_rollout_log_function_path": None,
            "custom_eval_rollout_log_function_path": None,
            "custom_convert_samples_to_train_data_path": None,
            "custom_reward_post_process_path": None,
            "save_debug_rollout_data": None,
            "load_debug_rollout_data": None,
            "load_debug_rollout_data_subsample": None,
            "debug_train_only": True,
            "debug_rollout_only": False,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": False,
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "use_dynamic_batch_size": False,
            "balance_data": False,
            "balance_by_flops": False,
            "rollout_num_gpus": 1,
            "log_reward_category": None,
            "wandb_always_use_train_step": False,
            "dump_details": None,
            "gates": {},
        }
        manager = RolloutManager(rollout_args(**{**base, **changes}))  # type: ignore[arg-type]
        manager.setup((None, [], []), {})
        manager.set_train_parallel_config(
            {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        )
        return manager

    return build


def trained(boxes: Any) -> list[int]:
    """The indices of the samples in boxed shards, in the order of generation."""
    return sorted(i for box in boxes for i in box.inner.to_rollout_data()["sample_indices"])


def test_a_rollout_becomes_one_boxed_shard_per_rank_and_metrics(make: Any, tmp_path: Path) -> None:
    manager = make()
    boxes = manager.generate(0)
    assert len(boxes) == 2
    assert trained(boxes) == [0, 1, 2, 3]  # 6 rollouts, one step of 4
    records = {r["name"]: r for r in manager.drain_records()}
    assert records["rollout/response_len/mean"]["value"] == 1.0
    assert records["rollout/dropped"]["value"] == 3
    assert {r["step_key"] for r in records.values()} == {"rollout/step"}
    assert manager.drain_records() == []  # once
    assert (tmp_path / "run" / "samples" / "0.jsonl").read_text().count("\n") == 6
    assert trained(manager.generate(1)) == [4, 5, 6, 7, 8, 9, 10, 11]  # what waited comes first


def test_saving_while_a_later_rollout_runs_writes_the_state_of_then(make: Any, tmp_path: Path) -> None:
    gate = Gate()
    manager = make(gates={1: gate})
    manager.generate(0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(manager.generate, 1)
        assert gate.drawn.wait(PATIENCE_S)
        assert manager.data_source.drawn == 6
        manager.save(0)  # returns, although rollout 1 holds the generation lock
        assert json.loads(state_path(str(tmp_path / "save"), 0).read_text()) == 3
        gate.go.set()
        running.result(PATIENCE_S)
    # rollout 1 has taken over what waited after rollout 0; the file still holds it
    carried = json.loads((tmp_path / "save" / "rollout" / "carried_over_0.json").read_text())
    assert [s["index"] for s in carried["samples"]] == [4, 5]
    assert manager.converter.carried.samples == []


def test_saving_late_still_writes_the_state_of_then(make: Any, tmp_path: Path) -> None:
    manager = make()
    for rollout_id in range(3):
        manager.generate(rollout_id)
    for rollout_id, waiting in ((0, [4, 5]), (1, None), (2, [16, 17])):
        manager.save(rollout_id)
        assert json.loads(state_path(str(tmp_path / "save"), rollout_id).read_text()) == 3 * (rollout_id + 1)
        path = tmp_path / "save" / "rollout" / f"carried_over_{rollout_id}.json"
        found = [s["index"] for s in json.loads(path.read_text())["samples"]] if path.exists() else None
        assert found == waiting


def test_a_source_without_snapshots_is_not_saved_in_the_middle_of_a_rollout(make: Any, tmp_path: Path) -> None:
    gate = Gate()
    manager = make(data_source_path=f"{HERE}.ForgetfulSource", gates={1: gate})
    manager.generate(0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(manager.generate, 1)
        assert gate.drawn.wait(PATIENCE_S)
        saving = pool.submit(manager.save, 0)
        assert not threading.Event().wait(0.2)
        assert not saving.done()
        gate.go.set()
        running.result(PATIENCE_S)
        saving.result(PATIENCE_S)
    assert json.loads(state_path(str(tmp_path / "save"), 0).read_text()) == 6


def test_a_resumed_run_trains_the_same_samples(make: Any, tmp_path: Path) -> None:
    uninterrupted = make()
    expected = [trained(uninterrupted.generate(rollout_id)) for rollout_id in range(4)]
    first = make()
    for rollout_id in range(2 + 1):
        first.generate(rollout_id)
        first.save(rollout_id)
    for start in (1, 2, 3):
        resumed = make(load=str(tmp_path / "save"))
        resumed.load(start - 1)
        assert [trained(resumed.generate(r)) for r in range(start, 4)] == expected[start:]


def test_what_waits_is_kept_without_a_data_set_and_the_source_is_left_alone(make: Any, tmp_path: Path) -> None:
    """Prompts that the user's code makes are the user's to save; the samples that wait for a step are ours."""
    first = make(rollout_global_dataset=False)
    assert trained(first.generate(0)) == [0, 1, 2, 3]
    first.save(0)
    resumed = make(rollout_global_dataset=False, load=str(tmp_path / "save"))
    resumed.load(0)
    assert resumed.data_source.drawn == 0
    assert [s.index for s in resumed.converter.carried.samples] == [4, 5]
    assert trained(resumed.generate(1)) == sorted([4, 5, *range(6)])
    assert not state_path(str(tmp_path / "save"), 0).exists()


def test_a_run_from_the_start_restores_nothing(make: Any, tmp_path: Path) -> None:
    first = make()
    first.generate(0)
    first.save(0)
    fresh = make(load=str(tmp_path / "save"))
    fresh.load(-1)
    assert fresh.converter.carried.samples == []


def test_old_snapshots_are_forgotten(make: Any) -> None:
    manager = make()
    for rollout_id in range(10):
        manager.generate(rollout_id)
    assert sorted(manager._carried_snapshots) == [6, 7, 8, 9]


def test_generation_alone_makes_no_training_data(make: Any, tmp_path: Path) -> None:
    manager = make(debug_rollout_only=True, save=None)
    manager.fleet = None
    assert manager.generate(0) is None
    assert (tmp_path / "run" / "samples" / "0.jsonl").exists()
    assert manager.converter.carried.samples == []


def test_a_dump_is_trained_on_as_it_was_generated(make: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    generated = make(save_debug_rollout_data=template)
    shards = [generated.generate(rollout_id) for rollout_id in range(2)]
    generated.drain_records()
    replayed = make(load_debug_rollout_data=template, rollout_function_path=f"{HERE}.must_not_run")
    for rollout_id in range(2):
        for box, expected in zip(replayed.generate(rollout_id), shards[rollout_id], strict=True):
            ours, theirs = box.inner.to_rollout_data(), expected.inner.to_rollout_data()
            assert ours.keys() == theirs.keys()
            assert ours["sample_indices"] == theirs["sample_indices"]
            assert ours["rewards"] == theirs["rewards"]
            assert [t.tolist() for t in ours["tokens"]] == [t.tolist() for t in theirs["tokens"]]
    assert replayed.drain_records() == []  # a replayed rollout says nothing about generation


def test_a_dump_is_replayed_where_the_hooks_of_generation_are_not_installed(make: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    generated = trained(make(save_debug_rollout_data=template).generate(0))
    away = {
        "custom_generate_function_path": "not_installed_here.generate", "custom_rm_path": "not_installed_here.reward",
        "rollout_sample_hook_path": ["not_installed_here.hook"],
    }  # fmt: skip
    replayed = make(load_debug_rollout_data=template, **away)
    assert trained(replayed.generate(0)) == generated
    with pytest.raises(RemoteFailure, match="no module 'not_installed_here'"):
        make(**away)
    with pytest.raises(RemoteFailure, match="no module 'not_installed_here'"):  # it is called for replayed ones too
        make(load_debug_rollout_data=template, custom_reward_post_process_path="not_installed_here.post_process")


def must_not_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("a replayed rollout must not be generated")


def test_hooks_may_take_over_the_logging(make: Any) -> None:
    calls.clear()
    manager = make(custom_rollout_log_function_path=f"{HERE}.log_hook")
    manager.generate(0)
    assert manager.drain_records() == []
    rollout_id, args, samples, metrics, seconds = calls[0]
    assert (rollout_id, len(samples), metrics) == (0, 6, {"rollout/dropped": 3})
    assert args is manager.args
    assert seconds > 0


async def log_nothing_twice(*arguments: Any) -> bool:
    calls.append(arguments)
    return len(calls) < 2


def test_hooks_may_take_over_the_logging_of_evaluations_and_may_be_coroutine_functions(make: Any) -> None:
    calls.clear()
    manager = make(custom_eval_rollout_log_function_path=f"{HERE}.log_nothing_twice")
    manager.args.debug_train_only = False
    manager.eval(4)
    assert manager.drain_records() == []
    rollout_id, args, data, metrics = calls[0]
    assert (rollout_id, list(data), metrics) == (4, ["held_out"], None)
    assert args is manager.args
    manager.eval(5)  # it returns False: the built-in metrics are written too
    assert "eval/held_out" in {record["name"] for record in manager.drain_records()}


async def generate_async(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    return generate(args, rollout_id, source, evaluation=evaluation)


def test_a_rollout_function_may_be_a_coroutine_function(make: Any) -> None:
    manager = make(rollout_function_path=f"{HERE}.generate_async")
    assert trained(manager.generate(0)) == [0, 1, 2, 3]


def generate_and_break(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    raise LookupError("no such column")


def test_what_a_hook_raises_reaches_the_driver_with_its_name_and_place(make: Any) -> None:
    with pytest.raises(RemoteFailure) as caught:
        make(rollout_function_path=f"{HERE}.generate_and_break").generate(0)
    line = generate_and_break.__code__.co_firstlineno
    place = f"--rollout-function-path '{HERE}.generate_and_break' ({__file__}:{line})"
    assert str(caught.value) == f"LookupError: no such column\n  in {place}"


def test_hooks_that_are_not_there_are_refused_before_anything_starts(make: Any) -> None:
    for flag, given, said in [
        ("custom_rm_path", f"{HERE}.log_hok", f"--custom-rm-path .* did you mean {HERE}.log_hook"),
        ("dynamic_sampling_filter_path", "my_filters.keep", "--dynamic-sampling-filter-path .* no module 'my_filters'"),
        ("rollout_sample_hook_path", [f"{HERE}.drop_one"], r"--rollout-sample-hook-path .* takes|has no attribute"),
        ("custom_convert_samples_to_train_data_path", f"{HERE}.Gate", "--custom-convert.* cannot be called"),
    ]:
        with pytest.raises(RemoteFailure, match=said):
            make(**{flag: given})


calls: list[Any] = []


def log_hook(*arguments: Any) -> bool:
    calls.append(arguments)
    return True


def test_siblings_must_share_their_rollout_id(make: Any) -> None:
    with pytest.raises(RemoteFailure, match=r"must share one rollout_id(.|\n)*--rollout-function-path '.*\.careless'"):
        make(rollout_function_path=f"{HERE}.careless").generate(0)


def careless(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    return [[[answer(Sample(prompt="p0", index=i, group_index=0)) for i in range(2)]]]


def test_evaluation(make: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    manager = make(save_debug_rollout_data=template)
    manager.eval(4)  # nothing under --debug-train-only
    assert manager.drain_records() == []
    manager.args.debug_train_only = False  # engines of another kind than the fleet's: none to wait for
    manager.eval(4)
    records = {r["name"]: (r["value"], r["step"], r["step_key"]) for r in manager.drain_records()}
    assert records["eval/held_out"] == (0.5, 4, "eval/step")
    assert records["eval/held_out-truncated_ratio"] == (0.5, 4, "eval/step")
    assert (tmp_path / "dumps" / "eval_4.pt").exists()
    assert (tmp_path / "run" / "samples" / "eval-4.jsonl").exists()


def test_rollouts_per_epoch(make: Any) -> None:
    assert make().get_num_rollout_per_epoch() == 3  # 10 prompts, 3 per rollout: one waits for the next epoch
    assert make(rollout_batch_size=11).get_num_rollout_per_epoch() == 0
    assert make(rollout_global_dataset=False).get_num_rollout_per_epoch() is None


class FakeFleet:
    """Engines that are ready when told so, and that can die."""

    def __init__(self, args: Any, slots: Any, wiring: Any, events: Any) -> None:
        self.on_death, self.events = events.engines_failed, events
        self.calls: list[str] = []
        self.num_new = 0
        self.ready, self.stopped = threading.Event(), False
        self.infos = [EngineInfo(f"http://127.0.0.1:{i}", 1, i, "regular", i) for i in range(2)]
        self.error: Exception | None = None
        fleets.append(self)

    def start(self) -> None:
        assert self.ready.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def offer(self) -> list[EngineInfo]:
        return self.infos

    def for_all(self, action: Callable[[Any], Any], states: Any = None) -> list[Any]:
        return [action(engine) for engine in self.engines]

    def resume_checks(self) -> None:
        self.calls.append("resume checks")

    def pause_checks(self) -> None:
        self.calls.append("pause checks")

    def recover(self) -> int:
        self.calls.append("recover")
        return self.num_new

    def admit(self) -> None:
        self.calls.append("admit")
        self.num_new = 0

    def lose_unreachable(self) -> None:
        self.calls.append("lose unreachable")

    def counts(self) -> dict[str, int]:
        return {"rollout/engines/restarted": 2}

    def stop(self) -> None:
        self.stopped = True
        self.ready.set()

    class Engine:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def flush_cache(self) -> None:
            self.calls.append("flush")

        def release_memory(self) -> None:
            self.calls.append("release")

        def resume_memory(self, tags: list[str] | None) -> None:
            self.calls.append(f"resume {tags}")

        def weights_checker(self, action: str) -> str:
            self.calls.append(action)
            return f"{action} done"

    engines = (Engine(), Engine())


fleets: list[FakeFleet] = []


@pytest.fixture
def with_engines(make: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[RolloutManager, Any]]]:
    monkeypatch.setattr(rollout_manager, "EngineFleet", FakeFleet)
    monkeypatch.setattr(rollout_manager, "init_http_client", lambda args: None)
    fleets.clear()

    def build(**changes: Any) -> tuple[RolloutManager, FakeFleet]:
        manager = make(debug_train_only=False, **changes)
        return manager, fleets[-1]

    yield build
    for fleet in fleets:
        fleet.ready.set()


def test_calls_wait_for_the_engines(with_engines: Any) -> None:
    manager, fleet = with_engines()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(manager.get_updatable_engines)
        rollout = pool.submit(manager.generate, 0)
        assert not threading.Event().wait(0.2)
        assert not asked.done()
        assert not rollout.done()
        fleet.ready.set()
        assert asked.result(PATIENCE_S) == fleet.infos
        assert trained(rollout.result(PATIENCE_S)) == [0, 1, 2, 3]


def test_offload_and_onload_reach_every_engine(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.engines = (FakeFleet.Engine(), FakeFleet.Engine())
    fleet.ready.set()
    manager.offload()
    manager.onload_weights()
    manager.onload_kv()
    manager.onload()
    assert manager.check_weights("checksum") == ["checksum done"] * 2
    for engine in fleet.engines:
        assert engine.calls == [
            "flush",  # release refuses an engine with a filled cache
            "release",
            "resume ['weights']",
            "resume ['kv_cache', 'cuda_graph']",
            "resume None",
            "checksum",
        ]


def test_engines_that_do_not_start_fail_every_call_and_the_watch(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.error = RemoteFailure("EngineStartError: engine 1 exited with 1\n  | out of memory")
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(manager.wait_for_failure)
        fleet.ready.set()
        with pytest.raises(EngineDied, match=r"engine 1 exited with 1\n  \| out of memory"):
            watch.result(PATIENCE_S)
    for call in (manager.get_updatable_engines, lambda: manager.generate(0), manager.offload, lambda: manager.eval(0)):
        with pytest.raises(EngineDied, match="engine 1 exited"):
            call()


def test_an_engine_that_dies_ends_the_rollout_in_progress(with_engines: Any) -> None:
    manager, fleet = with_engines(rollout_function_path=f"{HERE}.generate_for_ever")
    fleet.ready.set()
    with ThreadPoolExecutor(2) as pool:
        rollout = pool.submit(manager.generate, 0)
        watch = pool.submit(manager.wait_for_failure)
        try:
            assert asking.wait(PATIENCE_S)
        finally:  # the pool waits for both
            fleet.on_death(EngineDied("engine 0 exited with -9"))
        for waiting in (rollout, watch):
            with pytest.raises(EngineDied, match="engine 0 exited with -9"):
                waiting.result(PATIENCE_S)
    with pytest.raises(EngineDied, match="engine 0 exited with -9"):
        manager.generate(1)


asking = threading.Event()


def generate_for_ever(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    async def ask() -> None:
        import asyncio

        asking.set()
        await asyncio.sleep(3 * PATIENCE_S)

    return async_utils.run(ask())


def test_rollouts_and_evaluations_are_checked_and_offloaded_engines_are_not(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.engines = (FakeFleet.Engine(),)
    fleet.ready.set()
    manager.generate(0)
    manager.offload()
    manager.eval(0)
    manager.health_monitoring_pause()
    manager.health_monitoring_resume()
    assert fleet.calls == ["resume checks", "pause checks"] * 2 + ["resume checks"]
    assert {r["name"]: r["value"] for r in manager.drain_records()}["rollout/engines/restarted"] == 2


def test_a_push_of_weights_has_a_beginning_and_an_end(with_engines: Any) -> None:
    manager, fleet = with_engines(sglang_pp_size=2, rollout_num_gpus_per_engine=4)
    fleet.ready.set()
    fleet.num_new = 1
    assert manager.recover_updatable_engines() == 1
    assert manager.get_updatable_engines() == fleet.infos
    manager.lose_unreachable_engines()
    manager.clear_updatable_num_new_engines()
    assert fleet.calls == ["recover", "lose unreachable", "admit"]


def test_what_trainers_of_old_ask_for_before_a_push(with_engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, fleet = with_engines(sglang_pp_size=2, rollout_num_gpus_per_engine=4)
    fleet.ready.set()
    fleet.num_new = 1
    locks: list[Any] = []

    def start(kind: Any) -> Any:
        def make() -> Any:
            locks.append(kind())
            return locks[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    monkeypatch.setattr(engine_control, "ray", SimpleNamespace(remote=start))
    engines, lock, num_new, gpus, offsets, sizes = manager.get_updatable_engines_and_lock()
    assert engines == fleet.infos
    assert (num_new, gpus, offsets) == (1, [1, 1], [0, 1])
    assert sizes == [{"tp_size": 2, "pp_size": 2, "ep_size": 1}] * 2
    assert lock.acquire()
    assert not lock.acquire()
    lock.release()
    assert lock.acquire()
    manager.get_updatable_engines_and_lock()
    assert len(locks) == 1


def test_the_need_of_weights_is_told_until_engines_serve(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(manager.wait_for_need_of_weights)
        assert not manager.needs_weights()
        fleet.events.engines_need_weights()
        with pytest.raises(EnginesNeedWeights):
            waiting.result(PATIENCE_S)
        assert manager.needs_weights()
        manager.recover_updatable_engines()
        manager.clear_updatable_num_new_engines()
        assert not manager.needs_weights()
        waiting = pool.submit(manager.wait_for_need_of_weights)
        manager.dispose()
        assert waiting.result(PATIENCE_S) is None
        assert not manager.needs_weights()


def test_a_run_without_engines_has_nothing_to_check_or_recover(make: Any) -> None:
    manager = make()
    assert manager.recover_updatable_engines() == 0
    assert manager.get_updatable_engines() == []
    manager.lose_unreachable_engines()
    manager.clear_updatable_num_new_engines()
    manager.health_monitoring_pause()
    manager.health_monitoring_resume()


def test_the_watch_ends_peacefully_with_the_run(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(manager.wait_for_failure)
        manager.dispose()
        assert watch.result(PATIENCE_S) is None
    assert fleet.stopped
