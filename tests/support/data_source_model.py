"""Histories of a run as its data source sees them, and what must be true of every one: lost 0, trained twice 0.

A history is a list of (action, number): groups are drawn, finished, given up, trained on; states and checkpoints are
saved in the order of either loop; and the run is killed, with the end of its journal lost at any byte.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.durable.recovery import GroupJournal
from slime.rollout.groups import copy_group
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args, write_prompts

PROMPTS, BATCH, COPIES, SEED = 5, 3, 2, 42
ACTIONS = (
    *["draw"] * 4, *["finish"] * 10, "give up", *["end"] * 4, *["state"] * 3, *["checkpoint"] * 3, "kill"
)  # fmt: skip
Status = Sample.Status
Group = list[Sample]


def prompt_of(number: int) -> str:
    """Return the prompt of a group by the documented rule: every epoch a permutation by the seed and the epoch."""
    order = list(range(PROMPTS))
    random.Random(SEED + number // PROMPTS).shuffle(order)
    return f"p{order[number % PROMPTS]}"


def number_of(group: Group) -> int:
    number = group[0].group_index
    assert number is not None
    return number


class History:
    """One run. ``keeps`` is a rollout function that keeps its groups across rollouts instead of handing them back."""

    def __init__(self, folder: Path, partial: bool, keeps: bool, buffer: bool, interval: int) -> None:
        self.folder = folder
        folder.mkdir()
        prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
        self.keeps = keeps
        self.type = RolloutDataSourceWithBuffer if buffer else RolloutDataSource
        self.args: Any = rollout_args(
            prompt_data=str(prompts), save=str(folder), load=str(folder), save_interval=interval, num_rollout=10**6,
            rollout_batch_size=BATCH, n_samples_per_prompt=COPIES, rollout_shuffle=True, rollout_seed=SEED,
            partial_rollout=partial,
        )  # fmt: skip
        self.checkpoint: tuple[int, list[list[int]]] = (-1, [])
        self.resumed = 0
        self._start()

    def _start(self) -> None:
        """Start (again) from the last checkpoint."""
        last, trained = self.checkpoint
        self.source = self.type(self.args)
        self.source.load(last)
        self.rollout, self.trained = last + 1, list(trained)
        self.running: list[Group] = []
        self.done: list[Group] = []
        self.to_save: list[int] = []
        self.half_saved: int | None = None
        self.models: dict[int, list[list[int]]] = {}
        if self.keeps:
            self.source.unconsumed = lambda: [*self.done, *self.running]

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal().flush()
        shutil.rmtree(self.folder)

    def _journal(self) -> GroupJournal:
        journal = self.source._recovery.journal
        assert journal is not None
        return journal

    def play(self, actions: list[tuple[str, int]]) -> None:
        for action, number in actions:
            getattr(self, f"_{action.replace(' ', '_')}")(number)

    def _draw(self, count: int) -> None:
        for group in self.source.get_samples(1 + count % 4):
            self._check(group)
            if all(s.status == Status.COMPLETED for s in group):
                self.resumed += 1
                self.done.append(group)
            else:
                self.running.append(group)

    def _check(self, group: Group) -> None:
        """A group that is handed out is its prompt, and of its responses nothing or the beginning."""
        for position, sample in enumerate(group):
            assert sample.index == number_of(group) * COPIES + position
            assert sample.prompt == prompt_of(number_of(group))
            assert sample.tokens == [sample.index] * sample.response_length
            assert (sample.rollout_log_probs or []) == [-1.0 / (1 + sample.index)] * sample.response_length
            rollouts = [int(version.partition(".")[0]) for version in sample.weight_versions]
            assert len(rollouts) == sample.response_length
            assert max(rollouts, default=0) <= self.rollout  # of no weights that are lost

    def _generate(self, group: Group, status: Status) -> None:
        for sample in group:
            assert sample.index is not None
            meta = {"finish_reason": {"type": "abort"}, "weight_version": f"{self.rollout}.{sample.response_length}"}
            sample.append_response_tokens(tokens=[sample.index], log_probs=[-1.0 / (1 + sample.index)], meta_info=meta)
            sample.status = status

    def _finish(self, which: int) -> None:
        if self.running:
            group = self.running.pop(which % len(self.running))
            self._generate(group, Status.COMPLETED)
            for sample in group:
                sample.reward = 1.0
            self.source.record_completed(group)
            self.done.append(group)

    def _give_up(self, which: int) -> None:
        """A generate function gives up on a group: it goes back, with what there is of it for partial rollouts."""
        if self.running and not self.keeps:
            group = self.running.pop(which % len(self.running))
            if self.args.partial_rollout:
                self._generate(group, Status.ABORTED)
            self.source.take_back([group])

    def _end(self, which: int) -> None:
        """Train on a batch, any of what is done, and hand back or keep the others."""
        if len(self.done) < BATCH or len(self.to_save) > 1:  # the overlapped loop runs one rollout ahead
            return
        random.Random(which).shuffle(self.done)
        batch, self.done = self.done[:BATCH], self.done[BATCH:]
        if not self.keeps:
            for group in self.running if self.args.partial_rollout else []:
                self._generate(group, Status.ABORTED)
            self.source.take_back([copy_group(group) for group in [*self.done, *self.running]])
            self.done, self.running = [], []
        self.source.record_consumed(self.rollout, iter_samples(batch))
        self.source.snapshot(self.rollout)
        self.trained.append([number_of(group) for group in batch])
        self.models[self.rollout] = list(self.trained)
        self.to_save.append(self.rollout)
        self.rollout += 1

    def _state(self, _: int) -> None:
        """Write the state of the oldest rollout that is not saved."""
        while self.to_save and self.half_saved is None:
            rollout = self.to_save.pop(0)
            if (rollout + 1) % self.args.save_interval == 0 or (rollout + 1) % (PROMPTS // BATCH) == 0:
                self.source.save(rollout)
                self.half_saved = rollout

    def _checkpoint(self, _: int) -> None:
        if self.half_saved is not None:
            self.checkpoint = (self.half_saved, self.models[self.half_saved])
            self.half_saved = None

    def _kill(self, cut: int) -> None:
        """Of the journal there is what the operating system had been given: at times not all."""
        journal = self._journal()
        journal.flush()
        files = sorted(journal.folder.glob("journal_*.jsonl"))
        if files and cut % 3 == 0:
            path = files[cut % len(files)]
            os.truncate(path, cut * 7919 % (path.stat().st_size + 1))
        self._start()

    def play_at_random(self, seed: int) -> None:
        """Play a random history, and look after each of its actions."""
        rng = random.Random(seed)
        for _ in range(rng.choice((10, 40, 120))):
            self.play([(rng.choice(ACTIONS), rng.randrange(10**4))])
            self.verify()

    def verify(self) -> None:
        """Assert that every drawn prompt was trained on once, or waits."""
        trained = [number for step in self.trained for number in step]
        waiting = [number_of(group) for group in [*self.done, *self.running, *self.source._waiting_groups()]]
        assert sorted(trained + waiting) == list(range(self.source.sample_group_index)), (trained, waiting)
