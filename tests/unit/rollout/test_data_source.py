"""Prompts in order, across epochs, through the buffer, and after a resume at any point."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout import data_source
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.durable import journal_writer
from slime.rollout.durable.state_codec import NotStorable, decode_value, encode_value
from slime.rollout.staleness import WeightClock
from slime.utils import atomic_file
from slime.utils.types import Sample
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts

HERE = __name__


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    monkeypatch.setattr(atomic_file, "sync", lambda path: None)  # hundreds of files would wait for the disk
    monkeypatch.setattr(journal_writer, "sync", lambda path: None)


@pytest.fixture
def make(tmp_path: Path):
    def build(prompts: int = 5, cls: type = RolloutDataSourceWithBuffer, **overrides: Any) -> Any:
        path = write_prompts(tmp_path / "prompts.jsonl", prompts)
        save = str(tmp_path / "checkpoints")
        return cls(rollout_args(prompt_data=str(path), **{"save": save, "load": save, **overrides}))

    return build


def prompts(groups: Any) -> list[str]:
    return [group[0].prompt for group in groups]


def expected_stream(count: int, n: int, shuffle: bool) -> list[str]:
    """The prompts of ``n`` draws, by the documented rule: per epoch a permutation seeded with seed + epoch."""
    stream: list[str] = []
    epoch = 0
    while len(stream) < n:
        order = list(range(count))
        if shuffle:
            random.Random(42 + epoch).shuffle(order)
        stream += [f"p{i}" for i in order]
        epoch += 1
    return stream[:n]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2, 2], [5, 5, 5], [12, 1, 7], [3, 0, 17], [1] * 11])
def test_the_stream_runs_through_epochs_without_a_gap(make, sizes, shuffle):
    source = make(rollout_shuffle=shuffle)
    drawn = [source.get_samples(size) for size in sizes]
    assert [len(groups) for groups in drawn] == sizes
    flat = [group for groups in drawn for group in groups]
    assert prompts(flat) == expected_stream(5, sum(sizes), shuffle)
    assert [s.index for s in iter_samples(flat)] == list(range(2 * sum(sizes)))
    assert [s.group_index for group in flat for s in group] == [i for i in range(sum(sizes)) for _ in range(2)]


def test_samples_of_a_group_are_independent(make):
    (group,) = make().get_samples(1)
    group[0].metadata["x"] = 1
    group[0].tokens.append(5)
    assert group[1].metadata == {}
    assert group[1].tokens == []
    assert make().get_samples(1)[0][0].metadata == {}


def test_without_a_data_set_samples_are_blank():
    source = RolloutDataSource(rollout_args(rollout_global_dataset=False))
    groups = source.get_samples(2)
    assert [(s.prompt, s.index, s.group_index) for s in iter_samples(groups)] == [
        ("", 0, 0), ("", 1, 0), ("", 2, 1), ("", 3, 1),
    ]  # fmt: skip
    assert len(source) == 0
    source.save(0)
    source.load(0)


def test_no_prompt_file_is_an_error():
    with pytest.raises(ValueError, match="--prompt-data is needed"):
        RolloutDataSource(rollout_args())


@pytest.mark.parametrize("flags", [{"load_debug_rollout_data": "dumps/{rollout_id}.pt"}, {"num_rollout": 0}])
def test_runs_that_draw_no_prompt_need_no_prompt_file(flags):
    source = RolloutDataSource(rollout_args(**flags))
    assert len(source) == 0
    source.load(-1)


def test_buffered_groups_come_first_and_in_order(make):
    source = make()
    first = source.get_samples(3)
    source.add_samples(first[1:])
    assert source.get_buffer_length() == 2
    assert prompts(source.get_samples(4)) == ["p1", "p2", "p3", "p4"]
    assert source.get_buffer_length() == 0


def test_groups_of_another_size_are_refused(make):
    with pytest.raises(AssertionError, match=r"a group of 1 samples \(indices \[7\]\).*--n-samples-per-prompt is 2"):
        make().add_samples([[Sample(index=7)]])
    with pytest.raises(RuntimeError, match="RolloutDataSourceWithBuffer"):
        make(cls=RolloutDataSource).add_samples([])


def take_last(args: Any, rollout_id: Any, buffer: list[Any], count: int) -> list[Any]:
    assert rollout_id is None
    return [buffer.pop() for _ in range(min(1, count))]


def take_all(args: Any, rollout_id: Any, buffer: list[Any], count: int) -> list[Any]:
    taken = list(buffer)
    buffer.clear()
    return taken


def test_the_buffer_filter_chooses(make):
    source = make(buffer_filter_path=f"{HERE}.take_last")
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(2)) == ["p2", "p3"]
    greedy = make(buffer_filter_path=f"{HERE}.take_all")
    greedy.add_samples(greedy.get_samples(3))
    with pytest.raises(ValueError, match="returned 3 groups, 2 were asked for"):
        greedy.get_samples(2)


def run_steps(source: Any, steps: list[tuple[int, int]]) -> list[list[str]]:
    """Each step draws ``a`` groups and hands back the last ``b`` of them; return what was consumed."""
    consumed = []
    for draw, back in steps:
        groups = source.get_samples(draw)
        kept = groups[: max(0, draw - back)]
        source.add_samples(groups[len(kept) :])
        consumed.append([f"{s.prompt}/{s.index}/{s.group_index}" for s in iter_samples(kept)])
    return consumed


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    ahead=st.integers(0, 3),
    shuffle=st.booleans(),
    count=st.integers(1, 6),
)
def test_a_resumed_stream_is_the_uninterrupted_one(tmp_path_factory, steps, cut, ahead, shuffle, count):
    """Stop after ``cut`` steps, with ``ahead`` later draws already made (the overlapped loop), and start again."""
    cut = min(cut, len(steps))
    folder = tmp_path_factory.getbasetemp() / "resume"
    folder.mkdir(exist_ok=True)
    path = write_prompts(folder / f"prompts{count}.jsonl", count)
    args = rollout_args(prompt_data=str(path), rollout_shuffle=shuffle, save=str(folder), load=str(folder))
    whole = run_steps(RolloutDataSourceWithBuffer(args), steps)

    first = RolloutDataSourceWithBuffer(args)
    before = run_steps(first, steps[:cut])
    first.snapshot(cut - 1)
    if ahead:
        groups = first.get_samples(ahead)
        for sample in iter_samples(groups):
            sample.metadata["later"] = True
        first.add_samples(groups[:1])
        first.snapshot(cut)
    if cut:
        first.save(cut - 1)
    second = RolloutDataSourceWithBuffer(args)
    second.load(cut - 1)
    assert before + run_steps(second, steps[cut:]) == whole


@pytest.mark.parametrize("ahead", [False, True], ids=["one after the other", "one ahead"])
@pytest.mark.parametrize(("count", "batch"), [(8, 4), (6, 4), (5, 5), (3, 4), (7, 2), (1, 3)])
@pytest.mark.parametrize("cls", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_resumed_before_at_and_after_every_end_of_an_epoch(make, count, batch, cls, ahead):
    """Three epochs and a bit, resumed after every rollout, in the order in which either loop draws and saves."""
    rollouts = -(-3 * count // batch) + 2
    expected = expected_stream(count, batch * rollouts, shuffle=True)
    args = {
        "prompts": count, "cls": cls, "rollout_shuffle": True, "rollout_batch_size": batch, "save_interval": 1,
        "num_rollout": rollouts,
    }  # fmt: skip
    for first in range(rollouts):
        source = make(**args)
        source.load(first - 1)
        seen = expected[: batch * first]
        drawn = source.get_samples(batch)
        source.snapshot(first)
        for rollout_id in range(first, rollouts):
            used = drawn
            if ahead and rollout_id + 1 < rollouts:
                drawn = source.get_samples(batch)
                source.snapshot(rollout_id + 1)
            seen = seen + prompts(used)
            source.save(rollout_id)
            if not ahead and rollout_id + 1 < rollouts:
                drawn = source.get_samples(batch)
                source.snapshot(rollout_id + 1)
        assert seen == expected
        assert [group[0].group_index for group in used] == list(range(batch * (rollouts - 1), batch * rollouts))


def test_a_source_without_buffer_keeps_what_it_is_handed_back(make):
    source = make(cls=RolloutDataSource)
    first = source.get_samples(4)
    source.take_back(first[1:3])
    source.save(0)
    again = make(cls=RolloutDataSource)
    again.load(0)
    for one in (source, again):
        assert prompts(one.get_samples(1) + one.get_samples(3)) == ["p1", "p2", "p4", "p0"]
    buffered = make()
    buffered.load(0)
    assert prompts(buffered.buffer) == ["p1", "p2"]


class TakesSamples(RolloutDataSource):
    """A data source of a user: groups handed back go where it wants them."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.mine: list[Any] = []

    def add_samples(self, samples: list[Any]) -> None:
        self.mine += samples


def test_a_class_with_a_buffer_of_its_own_is_given_what_is_handed_back(make):
    source = make(cls=TakesSamples)
    group = source.get_samples(1)
    source.take_back(group)
    assert source.mine == group
    assert prompts(source.get_samples(1)) == ["p1"]


class OwnOrder(RolloutDataSource):
    """Prompts in an order of its own, which knows nothing of groups that were handed back."""

    def get_samples(self, num_samples: int) -> Any:
        return [self._make_group(self.dataset.samples[0]) for _ in range(num_samples)]


class Doubled(RolloutDataSource):
    def get_samples(self, num_samples: int) -> Any:
        return super().get_samples(2 * num_samples)


def test_a_class_that_never_hands_out_what_it_is_handed_back_says_so(make, caplog):
    source = make(cls=OwnOrder)
    source.take_back(source.get_samples(2))
    assert "2 groups are dropped because OwnOrder takes none back" in caplog.text
    assert source.state_dict()["buffer"] == []
    source = make(cls=Doubled)
    first = source.get_samples(1)
    source.take_back(first)
    source.save(0)
    again = make(cls=Doubled)
    again.load(0)
    assert source.get_samples(1) == first
    assert prompts(again.get_samples(1)) == prompts(first)


def test_tokens_in_the_buffer_keep_their_age_across_a_restart_that_numbers_versions_again(make, monkeypatch):
    clock = WeightClock()
    monkeypatch.setattr(data_source, "weight_clock", lambda: clock)
    clock.publish(1, 6)
    source = make()
    ((one, two),) = source.get_samples(1)
    spans = [{"version": "2", "start": 0, "end": 1}]  # pushed, and not reported yet
    reply = {"finish_reason": "abort", "weight_versions": spans}
    one.append_response_tokens(tokens=[5], log_probs=[0.0], meta_info=reply)
    source.add_samples([[one, two]])
    source.save(4)
    again = make()
    again.load(4)
    ((found, _),) = again.get_samples(1)
    assert found.weight_version_spans == [{**spans[0], "step": 6}]
    assert one.weight_version_spans == spans  # this process will know better


def test_what_is_in_the_buffer_survives_exactly(make):
    source = make()
    source.update_metadata({"seen": 3})
    ((one, two),) = source.get_samples(1)
    one.append_response_tokens(tokens=list(range(50)), log_probs=[-i / 7 for i in range(50)], text="é\n")
    one.status = Sample.Status.ABORTED
    one.rollout_routed_experts = torch.arange(12, dtype=torch.int32).reshape(2, 2, 3)
    one.teacher_log_probs = torch.tensor([1.5, float("-inf")], dtype=torch.bfloat16)
    one.metadata = {
        "__ints__": "not a tag",
        "n": np.float32(0.5),
        "t": (1, 2),
        "nan": [float("nan")] * 20,
        "b": b"\x00",
    }
    one.extra = np.arange(3)
    one.handle = threading.Lock()  # cannot be stored: left out with a warning
    source.add_samples([[one, [two, Sample(index=9)]]])
    source.save(4)
    again = make()
    again.load(4)
    assert again.get_metadata() == {"seen": 3}
    ((first, (second, third)),) = again.buffer
    assert (first.tokens, first.rollout_log_probs) == (one.tokens, one.rollout_log_probs)
    assert (first.response, first.status, first.loss_mask) == (one.response, Sample.Status.ABORTED, [1] * 50)
    assert torch.equal(first.rollout_routed_experts, one.rollout_routed_experts)
    assert first.rollout_routed_experts.dtype == torch.int32
    assert torch.equal(first.teacher_log_probs, one.teacher_log_probs)
    assert first.metadata["__ints__"] == "not a tag"
    assert first.metadata["n"] == 0.5
    assert first.metadata["t"] == [1, 2]
    assert all(x != x for x in first.metadata["nan"])
    assert first.metadata["b"] == b"\x00"
    assert first.extra.tolist() == [0, 1, 2]
    assert not hasattr(first, "handle")
    assert second == two
    assert third.index == 9


def test_a_field_that_cannot_be_stored_is_an_error(make):
    source = make()
    group = source.get_samples(1)[0]
    group[0].train_metadata = {"handle": threading.Lock()}
    source.add_samples([group])
    with pytest.raises(NotStorable, match=r"sample index=0: field 'train_metadata'"):
        source.save(0)


@pytest.mark.parametrize(
    "value", [[1] * 20, [2**70] * 20, [1.5] * 20, [True] * 20, [1, 1.5] * 20, ["a"] * 20, [], [[1] * 16]]
)
def test_lists_keep_their_types(value):
    again = decode_value(json.loads(json.dumps(encode_value(value))))
    assert again == value
    assert [type(x) for x in again] == [type(x) for x in value]


def test_a_state_of_an_older_release_loads(make, tmp_path):
    folder = tmp_path / "checkpoints" / "rollout"
    folder.mkdir(parents=True)
    state = {"sample_offset": 3, "epoch_id": 1, "sample_group_index": 8, "sample_index": 16, "metadata": {"a": 1}}
    torch.save(state, folder / "global_dataset_state_dict_7.pt")
    source = make(rollout_shuffle=True)
    source.load(7)
    assert prompts(source.get_samples(4)) == expected_stream(5, 12, True)[8:]
    assert source.get_metadata() == {"a": 1}


def test_loading_nothing_starts_afresh(make, caplog):
    source = make()
    source.load(5)
    assert "no data source state" in caplog.text
    source.load(None)
    source.load(-1)
    assert prompts(source.get_samples(1)) == ["p0"]


def test_other_data_than_before_is_noticed(make, caplog):
    source = make(prompts=5)
    source.get_samples(4)
    source.save(0)
    more = make(prompts=6)
    more.load(0)
    assert "saved with 5 prompts and now has 6" in caplog.text
    fewer = make(prompts=3)
    with pytest.raises(ValueError, match=r"had used 4 prompts .* holds only 3"):
        fewer.load(0)
    with pytest.raises(ValueError, match="format 99"):
        source.load_state_dict({**source.state_dict(), "format": 99})


def test_saving_is_whole_or_not_at_all(make, tmp_path, monkeypatch):
    source = make()
    source.get_samples(2)
    source.save(0)
    folder = tmp_path / "checkpoints" / "rollout"
    before = (folder / "global_dataset_state_dict_0.json").read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(atomic_file.os, "replace", fail)
    source.get_samples(2)
    with pytest.raises(OSError, match="disk full"):
        source.save(0)
    assert (folder / "global_dataset_state_dict_0.json").read_bytes() == before
    assert [p.name for p in folder.iterdir()] == ["global_dataset_state_dict_0.json"]


def test_snapshots_do_not_pile_up(make):
    source = make()
    for rollout_id in range(50):
        source.get_samples(1)
        source.snapshot(rollout_id)
    assert sorted(source._snapshots) == [46, 47, 48, 49]
    source.save(48)
    assert sorted(source._snapshots) == [49]


def test_drawing_and_saving_from_several_threads(make, tmp_path):
    source = make(prompts=7)
    drawn: list[Any] = []

    def draw() -> None:
        for _ in range(50):
            drawn.extend(source.get_samples(1))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for rollout_id in range(20):
        source.save(rollout_id)
    for thread in threads:
        thread.join()
    assert sorted(s.index for s in iter_samples(drawn)) == list(range(400))


def test_saving_needs_a_place(make):
    with pytest.raises(ValueError, match="--save"):
        make(save=None).save(0)
