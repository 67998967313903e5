"""A run that ends at any moment and starts again: what had been generated is restored in its old place, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout import data_source
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.durable import journal_writer, recovery
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import atomic_file
from slime.utils.types import Sample
from tests.support.data_source_model import ACTIONS, History
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts

Status = Sample.Status
Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    monkeypatch.setattr(atomic_file, "sync", lambda path: None)
    monkeypatch.setattr(journal_writer, "sync", lambda path: None)


def resumed_args(folder: Path, **changes: Any) -> dict[str, Any]:
    save = str(folder / "save")
    return {"save": save, "load": save, "save_interval": 2, "num_rollout": 100, "rollout_batch_size": 6, **changes}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start the run, resumed after ``rollout_id``."""

    def begin(rollout_id: int = -1, cls: type = RolloutDataSourceWithBuffer, **changes: Any) -> Any:
        prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
        source = cls(rollout_args(prompt_data=str(prompts), **resumed_args(tmp_path, **changes)))
        source.load(rollout_id)
        return source

    return begin


def test_a_first_start_keeps_what_the_second_takes_up(tmp_path: Path) -> None:
    """The flags of one command line, before there is a checkpoint and after."""
    from tests.support.arguments import parse

    save = tmp_path / "save"
    words = ("--load", save, "--save", save, "--save-interval", 2)
    first = parse(*words)
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("1")
    second = parse(*words)
    assert first.load != second.load == str(save)
    journals = [recovery.Recovery(args).journal for args in (first, second)]
    assert None not in journals
    assert recovery._setting(first) == recovery._setting(second)
    elsewhere = ("--load", save, "--save", tmp_path / "other", "--save-interval", 2, "--finetune")
    assert recovery.Recovery(parse(*elsewhere)).journal is None


def finish(group: list[Sample], status: Status = Status.COMPLETED) -> list[Sample]:
    for sample in group:
        sample.append_response_tokens(tokens=[sample.index], log_probs=[-1.0], text="x")
        sample.status, sample.reward = status, 1.0
    return group


def kill(source: Any) -> None:
    """Do the work that the journal's thread would have had the time for."""
    source._recovery.journal.flush()


def numbers(groups: Any) -> list[int]:
    return [next(iter_samples(group)).group_index for group in groups]


@pytest.mark.parametrize("cls", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_finished_groups_are_restored_in_their_place(start: Start, cls: type) -> None:
    source = start(cls=cls)
    groups = source.get_samples(4)
    finished = finish(groups[1])
    source.record_completed(finished)
    kill(source)
    again = start(cls=cls)
    drawn = again.get_samples(3) + again.get_samples(3)
    assert numbers(drawn) == [0, 1, 2, 3, 4, 5]
    assert drawn[1] == finished
    assert all(s.status == Status.PENDING and not s.tokens for g in (drawn[0], *drawn[2:]) for s in g)
    kill(again)
    assert start(cls=cls).get_samples(2)[1] == finished  # after a second end too


def test_what_was_handed_back_unfinished_is_restored(start: Start) -> None:
    source = start(partial_rollout=True)
    groups = source.get_samples(3)
    partial = finish(groups[2], Status.ABORTED)
    source.add_samples([groups[0], partial])
    kill(source)
    drawn = start(partial_rollout=True).get_samples(3)
    assert numbers(drawn) == [0, 1, 2]
    assert drawn[2] == partial
    assert drawn[0][0].status == Status.PENDING


def test_groups_of_the_buffer_are_restored_in_their_place(start: Start) -> None:
    source = start()
    groups = source.get_samples(2)
    source.snapshot(0)
    source.add_samples(groups)
    source.snapshot(1)
    source.save(1)
    first, second = source.get_samples(2)
    assert numbers([first, second]) == [0, 1]
    source.record_completed(finish(second))
    kill(source)
    again = start(1)
    assert again.get_buffer_length() == 2
    drawn = again.get_samples(3)
    assert numbers(drawn) == [0, 1, 2]
    assert drawn[1] == second
    assert drawn[0][0].status == Status.PENDING


def test_what_weights_made_that_no_checkpoint_holds_is_generated_again(start: Start, tmp_path: Path) -> None:
    """Saved after rollouts 1, 3, 5, ...: only what rollouts 0, 2, 4, 6, ... generate is of use to a second start."""
    source = start()
    for rollout_id in range(6):
        source.record_completed(finish(source.get_samples(1)[0]))
        source.record_consumed(rollout_id, [Sample(group_index=rollout_id)] * 2)
        source.snapshot(rollout_id)
        if rollout_id % 2:
            source.save(rollout_id)
        kill(source)
    files = sorted(path.name for path in (tmp_path / "save" / "rollout").glob("journal_*"))
    assert files == ["journal_4.jsonl", "journal_6.jsonl"]  # the last checkpoint may not be whole yet
    drawn = start(3).get_samples(3)
    assert numbers(drawn) == [4, 5, 6]
    assert [group[0].status for group in drawn] == [Status.COMPLETED, Status.PENDING, Status.PENDING]


def test_what_is_left_of_a_rollout_is_not_for_a_later_one(start: Start) -> None:
    source = start()
    groups = source.get_samples(3)
    source.record_completed(finish(groups[2]))
    kill(source)
    again = start()
    again.get_samples(2)
    again.snapshot(0)
    assert again.get_samples(1)[0][0].status == Status.PENDING


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_temperature": 0.3},
        {"rm_type": "math"},
        {"load": None},
        {"save_interval": None},
        {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
    ],
)
def test_other_commands_start_from_the_prompts(start: Start, changes: dict[str, Any]) -> None:
    source = start()
    source.record_completed(finish(source.get_samples(1)[0]))
    kill(source)
    assert start(**changes).get_samples(1)[0][0].status == Status.PENDING


def test_other_prompts_are_not_mistaken_for_those_of_then(start: Start, tmp_path: Path) -> None:
    source = start()
    finished = [finish(group) for group in source.get_samples(2)]
    finished[0][0].prompt = "another"
    for group in finished:
        source.record_completed(group)
    kill(source)
    drawn = start().get_samples(2)
    assert [group[0].status for group in drawn] == [Status.PENDING, Status.COMPLETED]


def test_runs_that_are_not_resumed_write_no_journal(start: Start, tmp_path: Path) -> None:
    source = start(load=None)
    source.record_completed(finish(source.get_samples(1)[0]))
    source.snapshot(1)
    source.save(1)
    names = [path.name for path in (tmp_path / "save" / "rollout").iterdir()]
    assert names == ["global_dataset_state_dict_1.json"]


def test_a_run_that_keeps_no_journal_removes_those_of_another_run(start: Start, tmp_path: Path) -> None:
    """Its checkpoints take the place of those that the journal belongs to."""
    source = start()
    source.record_completed(finish(source.get_samples(1)[0]))
    kill(source)
    anew = start(load=None)
    anew.get_samples(1)
    anew.snapshot(0)
    assert (tmp_path / "save" / "rollout" / "journal_0.jsonl").exists()
    anew.save(0)
    assert not (tmp_path / "save" / "rollout" / "journal_0.jsonl").exists()


def test_groups_still_worked_on_are_saved_and_come_first(start: Start) -> None:
    """A rollout function that works across rollouts says what it holds, while it continues drawing."""
    source = start()
    held = source.get_samples(4)[1:]
    finish(held[1])
    source.add_samples([held.pop()])

    def unconsumed() -> list[Any]:
        held.extend(source.get_samples(2))  # one from the buffer and a new one: drawn after the state was taken
        return list(held)

    source.unconsumed = unconsumed
    source.snapshot(1)
    source.unconsumed = None
    source.save(1)
    again = start(1)
    drawn = again.get_samples(5)
    assert numbers(drawn) == [1, 2, 3, 4, 5]
    assert [group[0].status for group in drawn[:3]] == [Status.PENDING, Status.COMPLETED, Status.PENDING]
    state = json.loads((Path(again.args.save) / "rollout" / "global_dataset_state_dict_1.json").read_text())
    assert [group[0]["group_index"] for group in state["in_flight"]] == [1, 2]


def test_the_default_rollout_does_not_generate_twice(cluster: Any, make_args: Any, tmp_path: Path) -> None:
    """Killed in the middle of a rollout, with three of its groups finished: only the others are generated again."""
    args = make_args(**resumed_args(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    source.load(-1)
    for engine in cluster.engines:
        engine.delay = lambda ids: 30.0 if chr(ids[1]) == "2" else 0.0
    args.rollout_batch_size, args.over_sampling_batch_size = 3, 4
    first = generate_rollout(args, 0, source)  # p2 is cancelled: as if the run had been killed then
    assert [group[0].prompt for group in first.samples] == ["p0", "p1", "p3"]
    kill(source)
    for engine in cluster.engines:
        engine.delay = 0.0
        engine.requests.clear()
    again = RolloutDataSourceWithBuffer(args)
    again.load(-1)
    args.rollout_batch_size = 4
    output = generate_rollout(args, 0, again)
    assert [group[0].prompt for group in output.samples] == ["p0", "p1", "p2", "p3"]
    asked = Counter("".join(map(chr, request["input_ids"])) for request in cluster.requests)
    assert asked == {"p2": 2}
    assert [output.samples[i] for i in (0, 1, 3)] == first.samples


def test_a_source_without_buffer_loses_nothing(cluster: Any, make_args: Any) -> None:
    args = make_args(over_sampling_batch_size=7)
    source = RolloutDataSource(args)
    used = [generate_rollout(args, rollout_id, source).samples for rollout_id in range(3)]
    assert [group[0].prompt for groups in used for group in groups] == [f"p{i}" for i in range(12)]


HISTORIES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 10**4)), max_size=40)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HISTORIES, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_no_history_loses_a_prompt_or_trains_it_twice(tmp_path, actions, partial, keeps, buffer, interval):
    with History(tmp_path / "run", partial and buffer, keeps, buffer, interval) as history:
        for action in actions:
            history.play([action])
            history.verify()
