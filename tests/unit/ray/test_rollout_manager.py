"""The rollout manager without Ray: what a rollout leaves behind, exact snapshots, and hooks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.ray.remote import RemoteFailure
from slime.utils.types import Sample
from tests.support.rollout_manager import PATIENCE_S, Gate, answer, generate, state_path, trained

HERE = __name__


def test_a_rollout_becomes_one_boxed_shard_per_rank_and_metrics(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager()
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


def test_saving_while_a_later_rollout_runs_writes_the_state_of_then(make_manager: Any, tmp_path: Path) -> None:
    gate = Gate()
    manager = make_manager(gates={1: gate})
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


def test_saving_late_still_writes_the_state_of_then(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager()
    for rollout_id in range(3):
        manager.generate(rollout_id)
    for rollout_id, waiting in ((0, [4, 5]), (1, None), (2, [16, 17])):
        manager.save(rollout_id)
        assert json.loads(state_path(str(tmp_path / "save"), rollout_id).read_text()) == 3 * (rollout_id + 1)
        path = tmp_path / "save" / "rollout" / f"carried_over_{rollout_id}.json"
        found = [s["index"] for s in json.loads(path.read_text())["samples"]] if path.exists() else None
        assert found == waiting


def test_a_source_without_snapshots_is_not_saved_in_the_middle_of_a_rollout(make_manager: Any, tmp_path: Path) -> None:
    gate = Gate()
    manager = make_manager(data_source_path="tests.support.rollout_manager.ForgetfulSource", gates={1: gate})
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


def test_a_resumed_run_trains_the_same_samples(make_manager: Any, tmp_path: Path) -> None:
    uninterrupted = make_manager()
    expected = [trained(uninterrupted.generate(rollout_id)) for rollout_id in range(4)]
    first = make_manager()
    for rollout_id in range(2 + 1):
        first.generate(rollout_id)
        first.save(rollout_id)
    for start in (1, 2, 3):
        resumed = make_manager(load=str(tmp_path / "save"))
        resumed.load(start - 1)
        assert [trained(resumed.generate(r)) for r in range(start, 4)] == expected[start:]


def test_what_waits_is_kept_without_a_data_set_and_the_source_is_left_alone(make_manager: Any, tmp_path: Path) -> None:
    """Prompts that the user's code makes are the user's to save; the samples that wait for a step are ours."""
    first = make_manager(rollout_global_dataset=False)
    assert trained(first.generate(0)) == [0, 1, 2, 3]
    first.save(0)
    resumed = make_manager(rollout_global_dataset=False, load=str(tmp_path / "save"))
    resumed.load(0)
    assert resumed.data_source.drawn == 0
    assert [s.index for s in resumed.converter.carried.samples] == [4, 5]
    assert trained(resumed.generate(1)) == sorted([4, 5, *range(6)])
    assert not state_path(str(tmp_path / "save"), 0).exists()


def test_a_run_from_the_start_restores_nothing(make_manager: Any, tmp_path: Path) -> None:
    first = make_manager()
    first.generate(0)
    first.save(0)
    fresh = make_manager(load=str(tmp_path / "save"))
    fresh.load(-1)
    assert fresh.converter.carried.samples == []


def test_old_snapshots_are_forgotten(make_manager: Any) -> None:
    manager = make_manager()
    for rollout_id in range(10):
        manager.generate(rollout_id)
    assert sorted(manager._carried_snapshots) == [6, 7, 8, 9]


def test_generation_alone_makes_no_training_data(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager(debug_rollout_only=True, save=None)
    manager.engines.fleet = None
    assert manager.generate(0) is None
    assert (tmp_path / "run" / "samples" / "0.jsonl").exists()
    assert manager.converter.carried.samples == []


def test_generation_alone_reports_what_a_trainer_would_of_its_data(make_manager: Any, tmp_path: Path) -> None:
    """The rewards above all; the names and numbers are those of a run that trains."""
    from slime.backends.megatron_utils.train.train_metrics import train_data_metrics

    manager = make_manager(debug_rollout_only=True, save=None, log_correct_samples=True)
    manager.engines.fleet = None
    manager.generate(0)
    found = {record["name"]: record["value"] for record in manager.drain_records()}
    whole = make_manager(global_batch_size=6, log_correct_samples=True)
    whole.converter.train_parallel_config = {"dp_size": 1, "cp_size": 1, "tp_size": 1, "pp_size": 1, "vpp_size": 1}
    whole.drain_records()
    [box] = whole.generate(0)
    expected = train_data_metrics(manager.args, box.inner.to_tensors())
    assert {"rollout/raw_reward", "rollout/rewards", "rollout/truncated"} <= expected.keys()
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_generation_alone_continues_with_samples_that_could_not_be_trained_on(
    make_manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(
        debug_rollout_only=True, save=None, custom_reward_post_process_path=f"{HERE}.without_rewards"
    )
    manager.engines.fleet = None
    assert manager.generate(0) is None
    found = {record["name"] for record in manager.drain_records()}
    assert "rollout/response_len/mean" in found
    assert "rollout/raw_reward" not in found
    assert "rollout 0 could not be trained on, rewards are not reported: " in caplog.text


def without_rewards(args: Any, samples: Any) -> Any:
    return [None for _ in samples], [None for _ in samples]


def test_a_dump_is_trained_on_as_it_was_generated(make_manager: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    generated = make_manager(save_debug_rollout_data=template)
    shards = [generated.generate(rollout_id) for rollout_id in range(2)]
    generated.drain_records()
    replayed = make_manager(load_debug_rollout_data=template, rollout_function_path=f"{HERE}.must_not_run")
    for rollout_id in range(2):
        for box, expected in zip(replayed.generate(rollout_id), shards[rollout_id], strict=True):
            ours, theirs = box.inner.to_rollout_data(), expected.inner.to_rollout_data()
            assert ours.keys() == theirs.keys()
            assert ours["sample_indices"] == theirs["sample_indices"]
            assert ours["rewards"] == theirs["rewards"]
            assert [t.tolist() for t in ours["tokens"]] == [t.tolist() for t in theirs["tokens"]]
    assert replayed.drain_records() == []  # a replayed rollout says nothing about generation


def test_a_dump_is_replayed_where_the_hooks_of_generation_are_not_installed(make_manager: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    generated = trained(make_manager(save_debug_rollout_data=template).generate(0))
    away = {
        "custom_generate_function_path": "not_installed_here.generate", "custom_rm_path": "not_installed_here.reward",
        "rollout_sample_hook_path": ["not_installed_here.hook"],
    }  # fmt: skip
    replayed = make_manager(load_debug_rollout_data=template, **away)
    assert trained(replayed.generate(0)) == generated
    with pytest.raises(RemoteFailure, match="no module 'not_installed_here'"):
        make_manager(**away)
    with pytest.raises(RemoteFailure, match="no module 'not_installed_here'"):  # it is called for replayed ones too
        make_manager(
            load_debug_rollout_data=template, custom_reward_post_process_path="not_installed_here.post_process"
        )


def must_not_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("a replayed rollout must not be generated")


def test_hooks_may_take_over_the_logging(make_manager: Any) -> None:
    calls.clear()
    manager = make_manager(custom_rollout_log_function_path=f"{HERE}.log_hook")
    manager.generate(0)
    assert manager.drain_records() == []
    rollout_id, args, samples, metrics, seconds = calls[0]
    assert (rollout_id, len(samples), metrics) == (0, 6, {"rollout/dropped": 3})
    assert args is manager.args
    assert seconds > 0


async def log_nothing_twice(*arguments: Any) -> bool:
    calls.append(arguments)
    return len(calls) < 2


def test_hooks_may_take_over_the_logging_of_evaluations_and_may_be_coroutine_functions(make_manager: Any) -> None:
    calls.clear()
    manager = make_manager(custom_eval_rollout_log_function_path=f"{HERE}.log_nothing_twice")
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


def test_a_rollout_function_may_be_a_coroutine_function(make_manager: Any) -> None:
    manager = make_manager(rollout_function_path=f"{HERE}.generate_async")
    assert trained(manager.generate(0)) == [0, 1, 2, 3]


def generate_and_break(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    raise LookupError("no such column")


def test_what_a_hook_raises_reaches_the_driver_with_its_name_and_place(make_manager: Any) -> None:
    with pytest.raises(RemoteFailure) as caught:
        make_manager(rollout_function_path=f"{HERE}.generate_and_break").generate(0)
    line = generate_and_break.__code__.co_firstlineno
    place = f"--rollout-function-path '{HERE}.generate_and_break' ({__file__}:{line})"
    assert str(caught.value) == f"LookupError: no such column\n  in {place}"


def test_hooks_that_are_not_there_are_refused_before_anything_starts(make_manager: Any) -> None:
    for flag, given, said in [
        ("custom_rm_path", f"{HERE}.log_hok", f"--custom-rm-path .* did you mean {HERE}.log_hook"),
        ("dynamic_sampling_filter_path", "my_filters.keep", "--dynamic-sampling-filter-path .* no module 'my_filters'"),
        ("rollout_sample_hook_path", [f"{HERE}.drop_one"], r"--rollout-sample-hook-path .* takes|has no attribute"),
        ("custom_convert_samples_to_train_data_path", f"{HERE}.Gate", "--custom-convert.* cannot be called"),
    ]:
        with pytest.raises(RemoteFailure, match=said):
            make_manager(**{flag: given})


calls: list[Any] = []


def log_hook(*arguments: Any) -> bool:
    calls.append(arguments)
    return True


def test_siblings_must_share_their_rollout_id(make_manager: Any) -> None:
    with pytest.raises(RemoteFailure, match=r"must share one rollout_id(.|\n)*--rollout-function-path '.*\.careless'"):
        make_manager(rollout_function_path=f"{HERE}.careless").generate(0)


def careless(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    return [[[answer(Sample(prompt="p0", index=i, group_index=0)) for i in range(2)]]]


def test_evaluation(make_manager: Any, tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    manager = make_manager(save_debug_rollout_data=template)
    assert manager.eval(4) == []  # nothing under --debug-train-only
    assert manager.drain_records() == []
    manager.args.debug_train_only = False  # engines of another kind than the fleet's: none to wait for
    assert manager.eval(4) == ["held_out: mean reward 0.5, 2 samples, 50.0% of them truncated"]
    records = {r["name"]: (r["value"], r["step"], r["step_key"]) for r in manager.drain_records()}
    assert records["eval/held_out"] == (0.5, 4, "eval/step")
    assert records["eval/held_out-truncated_ratio"] == (0.5, 4, "eval/step")
    assert (tmp_path / "dumps" / "eval_4.pt").exists()
    assert (tmp_path / "run" / "samples" / "eval-4.jsonl").exists()


def test_a_reward_that_never_differs_is_reported(make_manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager()
    manager._make_rollout = lambda args, rollout_id, source, evaluation=False: [
        [Sample(reward=0.25, tokens=[1, 2], response_length=1, group_index=i)] for i in range(4)
    ]
    for rollout_id in range(4):
        manager.generate(rollout_id)
    assert [m for m in caplog.messages if "the reward of all 12 samples of rollouts 0 to 2 is 0.25" in m]


def test_rollouts_per_epoch(make_manager: Any) -> None:
    assert make_manager().get_num_rollout_per_epoch() == 3  # 10 prompts, 3 per rollout: one waits for the next epoch
    assert make_manager(rollout_batch_size=11).get_num_rollout_per_epoch() == 0
    assert make_manager(rollout_global_dataset=False).get_num_rollout_per_epoch() is None


def nothing(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    return []


def test_a_rollout_without_a_sample_is_named(make_manager: Any) -> None:
    manager = make_manager(rollout_function_path=f"{HERE}.nothing")
    with pytest.raises((RemoteFailure, ValueError), match="rollout 3 holds no sample"):
        manager.generate(3)


def with_a_lock(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    output = generate(args, rollout_id, source, evaluation)
    for group in output.samples:
        for sample in group:
            sample.train_metadata = {"lock": threading.Lock()}
    return output


def test_what_cannot_be_saved_ends_no_run_that_does_not_save_it(make_manager: Any) -> None:
    manager = make_manager(rollout_function_path=f"{HERE}.with_a_lock", save_interval=2, num_rollout=9)
    assert trained(manager.generate(0)) == [0, 1, 2, 3]
    assert len(manager.converter.carried) == 2
    manager.generate(1)  # nothing waits now
    assert not manager.converter.carried
    manager.generate(4)
    manager.generate(6)
    with pytest.raises((RemoteFailure, TypeError), match="cannot be saved"):
        manager.generate(3)
