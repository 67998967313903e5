"""Data sources as they were written for slime <= 0.3.1: their ``__init__`` sets the attributes and calls no other."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, hand_back, pop_first
from slime.utils.types import Sample
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts


class Numbers(list[Sample]):
    """A data set of the user's own."""

    @property
    def samples(self) -> list[Sample]:
        return list(self)


class BareSource(RolloutDataSource):
    """It makes its own prompts."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata = {}
        self.dataset = Numbers(Sample(prompt=f"p{i}") for i in range(4))


class BareBuffer(RolloutDataSourceWithBuffer):
    """Its own buffer, lock, and way of taking groups from the buffer: the newest first."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata = {}
        self.dataset = Numbers(Sample(prompt=f"p{i}") for i in range(4))
        self.buffer = []
        self.buffer_filter = pop_first
        self._lock = threading.Lock()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            return super().get_samples(num_samples)

    def _get_samples_from_buffer(self, num_samples: int) -> list[list[Sample]]:
        taken = self.buffer[::-1][:num_samples]
        self.buffer = self.buffer[: len(self.buffer) - len(taken)]
        return taken


class Nothing(RolloutDataSourceWithBuffer):
    """It relies on what it inherits for every attribute."""

    def __init__(self, args: Any) -> None:
        pass


class Dutiful(BareBuffer):
    def __init__(self, args: Any) -> None:
        RolloutDataSourceWithBuffer.__init__(self, args)
        self._lock = threading.Lock()


ALL = [BareSource, BareBuffer, Nothing, Dutiful]


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
    save = str(tmp_path / "save")
    prompts = str(write_prompts(tmp_path / "prompts.jsonl", 4))
    return rollout_args(prompt_data=prompts, save=save, load=save, save_interval=1, num_rollout=9)


def names(groups: list[list[Sample]]) -> list[str]:
    return [group[0].prompt for group in groups]


@pytest.mark.parametrize("cls", ALL)
def test_a_rollout_a_checkpoint_and_a_resume_work(cls: Any, args: Any) -> None:
    """Make the calls of the rollout manager and of the rollout functions, in their order."""
    source = cls(args)
    first = source.get_samples(2)
    for group in first:
        source.record_completed(group)
    source.record_consumed(0, [sample for group in first for sample in group])
    source.snapshot(0)
    second = source.get_samples(2)
    source.save(0)
    hand_back(source, second)
    assert sorted(names(source.get_samples(2))) == sorted(names(second))
    again = cls(args)
    again.load(0)
    assert names(again.get_samples(2)) == names(second)
    assert again.sample_group_index == 4
    assert [[sample.index for sample in group] for group in second] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("cls", ALL)
def test_that_nothing_is_recovered_is_said_once_where_it_matters(cls: Any, args: Any, caplog: Any) -> None:
    source = cls(args)
    for rollout_id in range(3):
        source.record_consumed(rollout_id, source.get_samples(1)[0])
    warned = [record.getMessage() for record in caplog.records if "super().__init__" in record.getMessage()]
    assert len(warned) == (0 if cls is Dutiful else 1)
    assert all(cls.__name__ in message for message in warned)
    caplog.clear()
    args.load = args.save = None
    args.continues_own_checkpoints = False
    cls(args).record_consumed(0, [])
    assert "super().__init__" not in caplog.text


@pytest.mark.parametrize("cls", [BareBuffer, Dutiful])
def test_the_overridden_way_out_of_the_buffer_is_used(cls: Any, args: Any) -> None:
    source = cls(args)
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert source.get_buffer_length() == 3
    assert names(source.get_samples(2)) == ["p2", "p1"]


def test_attributes_begin_as_those_of_a_source_that_was_set_up(args: Any) -> None:
    bare, whole = Nothing(args), RolloutDataSourceWithBuffer(args)
    kept = ("epoch_id", "sample_group_index", "sample_index", "sample_offset", "metadata", "buffer", "args")
    assert {name: getattr(bare, name) for name in kept} == {name: getattr(whole, name) for name in kept}
    assert bare.buffer_filter is pop_first
    assert bare.dataset is None


def test_constructors_of_another_form(args: Any) -> None:
    class Named(RolloutDataSourceWithBuffer):
        def __init__(self, *, config: Any, prompts: list[str]) -> None:
            self.args = config
            self.dataset = Numbers(Sample(prompt=prompt) for prompt in prompts)

    source = Named(config=args, prompts=["a", "b"])
    assert names(source.get_samples(3)) == ["a", "b", "a"]
    source.record_consumed(0, [])
    source.snapshot(0)
    source.save(0)
    assert copy.copy(source).get_buffer_length() == 0
