"""Recovery of a data source after a run was killed: finished groups are kept and returned in their old place.

Prompts are never in danger: their order follows from the state saved with each checkpoint. The journal keeps work:
groups that were generated after it. It is one file per rollout that directly follows a checkpoint,
``<save>/rollout/journal_<rollout>.jsonl``; what later rollouts generate comes from weights that no checkpoint holds,
and is of no use to a resumed run.

Records (see ``journal_file`` for their form): ``begin`` (first; the flags that decide what is generated),
``dispatched`` (indices of groups handed out), ``completed`` (a group with its samples), ``returned`` (a group handed
back, with what was generated of it), ``consumed`` (indices of the groups that a rollout gave to training).

A separate thread (``journal_writer``) encodes and writes; every record is with the operating system before the next
is encoded, and on the disk at most ``SYNC_INTERVAL_S`` later. A killed process loses what waits for that thread, a lost
machine at most that interval more, and both only work. A disk that fails ends the journal of a rollout with an error in
the log, never the run; the next rollout that is worth keeping tries again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.arguments.args import Args
from slime.arguments.groups import slime_flags
from slime.rollout.durable.journal_file import read_records
from slime.rollout.durable.journal_writer import JournalWriter
from slime.rollout.durable.state_codec import decode_group
from slime.rollout.groups import copy_group
from slime.utils.misc import should_run_periodic_action
from slime.utils.types import Sample, iter_samples

logger = logging.getLogger(__name__)

Group = list[Sample]
FORMAT = 2
READABLE = (1, 2)


class Recovery:
    """The journal of a data source, and the groups that were recovered from it.

    Everything is a no-op in runs that a second start does not resume: without ``--save`` and a ``--load`` of the same
    directory, with ``--finetune``, without ``--save-interval``, and with ``--mask-offpolicy-in-partial-rollout``, which
    would mask what is recovered. ``of_a_bare`` data source, a class whose ``__init__`` is not ours, too.
    """

    def __init__(self, args: Args, *, of_a_bare: str = "") -> None:
        self.args, self._bare = args, of_a_bare
        wanted = not of_a_bare and _is_resumed(args)
        self.journal = GroupJournal(Path(args.save) / "rollout", _setting(args)) if wanted and args.save else None
        self.groups: dict[int, Group] = {}
        self._last_saved = -1

    def resume(self, rollout_id: int) -> None:
        """Take in what an earlier start did after the checkpoint of ``rollout_id`` (-1: before the first)."""
        if self.journal is None:
            return
        self._last_saved = rollout_id
        self.groups = self.journal.resume(rollout_id + 1).generated
        if self.groups:
            path = self.journal.path(rollout_id + 1)
            logger.info("%d groups generated before the restart are recovered from %s", len(self.groups), path)

    def hand_out(self, groups: list[Group]) -> list[Group]:
        """Return ``groups``, recovered ones in the place of their prompts, and note that they are handed out."""
        if self.journal is not None and groups:
            self.journal.dispatched(groups)
        return [self._replace(group) for group in groups] if self.groups else groups

    def _replace(self, group: Group) -> Group:
        number = group_index(group)
        found = None if number is None else self.groups.pop(number, None)
        return group if found is None or not _same_prompt(found, group) else found

    def completed(self, group: Group) -> None:
        """Keep a finished group, as it is now."""
        if self.journal is not None:
            self.journal.completed(group)

    def returned(self, groups: Iterable[Group]) -> None:
        """Keep what was generated of groups that were handed back."""
        if self.journal is not None:
            for group in groups:
                self.journal.returned(group)

    def consumed(self, rollout_id: int, samples: Iterable[Sample]) -> None:
        """Note the groups that ``rollout_id`` trains on."""
        if self.journal is not None:
            self.journal.consumed(rollout_id, sorted({s.group_index for s in samples if s.group_index is not None}))
        elif self._bare and self.args is not None and _is_resumed(self.args):
            logger.warning(
                "%s does not call super().__init__(args): groups that it hands out are not kept in a journal, and a "
                "run that is killed generates them again after it is resumed", self._bare,
            )  # fmt: skip
            self._bare = ""

    def after_rollout(self, rollout_id: int, rollouts_per_epoch: int) -> None:
        """Continue with the next rollout, whose groups are worth keeping when the weights that make them are saved."""
        self.groups.clear()  # the rest was generated by weights that are gone
        if self.journal is not None:
            saved = may_be_saved(self.args, rollout_id, rollouts_per_epoch)
            self.journal.turn_over(rollout_id + 1, wanted=saved)

    def after_save(self, rollout_id: int) -> None:
        """Drop what no restart can need. The checkpoint of ``rollout_id`` is still to come: keep the one before it.

        A run without a journal drops those of earlier runs: what they generated was not made by its weights.
        """
        if self.journal is not None:
            self.journal.forget_before(self._last_saved + 1)
        elif self.args is not None and self.args.save is not None:
            remove_journals(Path(self.args.save) / "rollout", lambda number: True)
        self._last_saved = rollout_id


def may_be_saved(args: Args, rollout_id: int, rollouts_per_epoch: int) -> bool:
    """True when there is a checkpoint of ``rollout_id``, or when that is up to someone else than the loop."""
    interval = args.save_interval
    if interval is None or args.release_train:  # which saves after every rollout
        return True
    return should_run_periodic_action(rollout_id, interval, rollouts_per_epoch, args.num_rollout)


def still_open(groups: Iterable[Group], state: dict[str, Any], buffer: Iterable[Group]) -> list[Group]:
    """Return those of ``groups`` that were drawn before ``state`` was taken, with ``buffer`` in the buffer."""
    later = {group_index(group) for group in buffer}
    return [
        g for g in groups if (n := group_index(g)) is not None and n < state["sample_group_index"] and n not in later
    ]


def _is_resumed(args: Args) -> bool:
    if not args.rollout_global_dataset or args.save_interval is None:
        return False
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        return False
    return bool(args.continues_own_checkpoints)


def _setting(args: Args) -> dict[str, Any]:
    """Return what decides what is generated: groups in the journal are used only if it is unchanged."""
    values = {flag.dest: getattr(args, flag.dest) for flag in slime_flags() if flag.traits.decides_generation}
    setting: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return setting


def _same_prompt(found: Group, drawn: Group) -> bool:
    """True when a recovered group is of the prompt that was drawn; the generate function fills a blank one."""
    first, second = next(iter_samples(found)), next(iter_samples(drawn))
    same = second.prompt in ("", first.prompt) and first.label == second.label
    return len(found) == len(drawn) and same


Unconsumed = Callable[[], list[Group]]


# The journal of groups


def group_index(group: Sample | list[Any]) -> int | None:
    """Return the number that the data source gave to a group, None when its first sample has none."""
    first = next(iter_samples(group), None)
    return None if first is None else first.group_index


@dataclass
class Replay:
    """A journal's contents: groups dispatched in order, the last state of each group generated, groups by rollout."""

    dispatched: list[int] = field(default_factory=list)
    generated: dict[int, Any] = field(default_factory=dict)
    consumed: dict[int, list[int]] = field(default_factory=dict)

    def apply(self, record: dict[str, Any]) -> None:
        """Take one record in. Records of other kinds are of no interest here."""
        kind = record["kind"]
        if kind == "dispatched":
            self.dispatched += record["groups"]
        elif kind == "consumed":
            self.consumed[record["rollout"]] = record["groups"]
        elif kind in ("completed", "returned"):
            if record["samples"] is None:
                self.generated.pop(record["group"], None)
            else:
                self.generated[record["group"]] = record["samples"]


class GroupJournal:
    """Writes the journal of a run in ``folder``, and reads what an earlier start with the same ``setting`` left.

    ``setting`` (JSON types) holds what determines what is generated: groups made under another one are not used.
    Methods may be called from several threads and do not wait for the disk.
    """

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.folder = folder
        self.setting = setting
        self._path: Path | None = None
        self._writer = JournalWriter()

    def path(self, rollout_id: int) -> Path:
        """Return the file of what rollout ``rollout_id`` did."""
        return self.folder / f"journal_{rollout_id}.jsonl"

    def resume(self, rollout_id: int) -> Replay:
        """Return what an earlier start did in rollout ``rollout_id``, continue writing there, and remove what is stale.

        Raises ValueError, naming the file, for one that is damaged.
        """
        self.flush()
        remove_journals(self.folder, lambda number: number != rollout_id)
        path = self.path(rollout_id)
        try:
            replay = self._read(path) if path.exists() else None
        except OSError as e:
            logger.error("%s cannot be used; what it holds is generated again: %s", path, e)
            replay = None
        self._open(rollout_id, begin=replay is None)
        return replay or Replay()

    def turn_over(self, rollout_id: int, *, wanted: bool) -> None:
        """From now on write about rollout ``rollout_id``, or with ``wanted`` off nothing."""
        if wanted:
            self._open(rollout_id, begin=True)
        else:
            self._path = None

    def forget_before(self, rollout_id: int) -> None:
        """Remove the files of earlier rollouts: their checkpoints have been followed by another one."""
        remove_journals(self.folder, lambda number: number < rollout_id)

    def dispatched(self, groups: Sequence[Any]) -> None:
        """Note that ``groups`` were handed out."""
        if numbers := [n for n in map(group_index, groups) if n is not None]:
            self._put({"kind": "dispatched", "groups": numbers})

    def completed(self, group: Sample | list[Any]) -> None:
        """Keep a finished group, as it is now."""
        self._put_group("completed", group)

    def returned(self, group: Sample | list[Any]) -> None:
        """Keep a group that was handed back, as it is now; one that is as it was drawn has nothing to keep."""
        self._put_group("returned", group)

    def consumed(self, rollout_id: int, numbers: Sequence[int]) -> None:
        """Note that rollout ``rollout_id`` trains on the groups ``numbers``."""
        self._put({"kind": "consumed", "rollout": rollout_id, "groups": list(numbers)})

    def flush(self) -> None:
        """Return when everything noted so far is in the files."""
        self._writer.flush()

    # Inside

    def _put_group(self, kind: str, group: Sample | list[Any]) -> None:
        number = group_index(group)
        if self._path is None or number is None:
            return
        drawn = all(s.status == Sample.Status.PENDING and not s.response_length for s in iter_samples(group))
        record = {"kind": kind, "group": number, "samples": None}
        self._put(record, None if drawn else copy_group(group))

    def _put(self, record: dict[str, Any], samples: Sample | list[Any] | None = None) -> None:
        if (path := self._path) is not None:
            self._writer.put(path, record, samples)

    def _open(self, rollout_id: int, *, begin: bool) -> None:
        path = self.path(rollout_id)
        self._writer.forget_failure(path)
        if begin:
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                self._writer.fail(path, e)
            self._writer.put(path, {"kind": "begin", "format": FORMAT, "rollout": rollout_id, "setting": self.setting})
        self._path = path

    def _read(self, path: Path) -> Replay | None:
        """Return what ``path`` holds, without what a kill left of its last line; None when it is of no use here."""
        replay, end = Replay(), 0
        for number, (record, position) in enumerate(read_records(path)):
            if number == 0 and record.get("format") not in READABLE:
                logger.warning("%s is not used: it is of another version of slime (%s)", path, record.get("format"))
                return None
            if number == 0 and record.get("setting") != self.setting:
                logger.warning("%s is not used: the flags that decide over what is generated have changed", path)
                return None
            replay.apply(record)
            end = position
        if (torn := path.stat().st_size - end) > 0:
            logger.warning("%s: the last %d bytes are no whole record and are cut off", path, torn)
            os.truncate(path, end)
        if end == 0:
            return None
        replay.generated = {number: decode_group(samples) for number, samples in replay.generated.items()}
        return replay


def remove_journals(folder: Path, stale: Callable[[int], bool]) -> None:
    """Remove the journals in ``folder`` of the rollouts that are ``stale``."""
    for path in folder.glob("journal_*.jsonl"):
        number = path.stem.removeprefix("journal_")
        if number.isdecimal() and stale(int(number)):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                logger.warning("%s is of no use any more and cannot be removed: %s", path, e)
