"""From the samples of a rollout to one shard of columns per data-parallel rank, and to files for debugging."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.algorithms.rewards import post_process_rewards
from slime.arguments.args import Args
from slime.batching.columns import RolloutColumns, RolloutShard, fill_rollout_ids
from slime.batching.schedule import build_dp_schedule, leftover_positions
from slime.batching.train_data import Rows, build_train_data, finite_reward, join_rows, take_rows, unused_ids
from slime.rollout import sglang_rollout
from slime.rollout.debug_data import load_rollout, save_rollout
from slime.rollout.durable.state_codec import NotStorable, decode_group, decode_value, encode_group, encode_value
from slime.rollout.groups import copy_sample
from slime.rollout.hooks.contracts import contracts_of
from slime.rollout.hooks.hook import Hook, find_hook, find_hooks
from slime.rollout.requests.images import complete
from slime.utils.atomic_file import write_atomically
from slime.utils.digests import seal, unseal
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass
class LeftoverSamples:
    """Samples whose rollouts did not fill a training step; they come first in the next one. Rewards are final.

    Of a converter of the user's, ``rows`` of the train data that it made of them take their place.
    """

    samples: list[Sample] = field(default_factory=list)
    raw_rewards: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples) + len(self.rows.get("tokens", ()))


class Converter:
    """Turns each rollout into shards. Samples beyond the last whole step wait for the next rollout, in order."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.train_parallel_config: Mapping[str, int] | None = None
        self.carried = LeftoverSamples()
        self._convert = find_hook(args, "custom_convert_samples_to_train_data_path")
        self._post_process = find_hook(args, "custom_reward_post_process_path")
        makers = (
            []
            if args.load_debug_rollout_data
            else find_hooks(args, *(name for name, hook in contracts_of("manager").items() if hook.makes_samples))
        )
        self._sample_hooks = [hook for hook in makers if not hook.path.startswith("slime.")]

    def shards(self, samples: Sequence[Sample]) -> list[RolloutShard]:
        """Return one shard per data-parallel rank of what ``samples``, after those carried over, train.

        Raises TrainDataError or ScheduleError naming what cannot be right.
        """
        if self.train_parallel_config is None:
            raise RuntimeError("the parallel layout of the trainers is not known yet (set_train_parallel_config)")
        batch = self._batch(list(samples))
        schedule = build_dp_schedule(
            self.args,
            self.train_parallel_config,
            batch.total_lengths.tolist(),
            global_batch_size=self.args.global_batch_size,
            rollout_indices=batch.rollout_ids,
        )
        return batch.shards(schedule)

    def whole(self, samples: Sequence[Sample]) -> RolloutShard:
        """Return ``samples`` as the one shard of one step, for a run that trains nothing; nothing is carried over.

        Raises TrainDataError naming what could not be trained on.
        """
        if self._convert is not None:
            data = self._convert(self.args, list(samples))
        else:
            data = build_train_data(self.args, samples, *self._rewards(list(samples)))
        batch = RolloutColumns.from_train_data(data)
        everything = list(range(len(batch)))
        return RolloutShard(
            batch=batch,
            dp_rank=0,
            partition=everything,
            micro_batch_indices=[everything],
            num_microbatches=[1],
            global_batch_sizes=[len(set(batch.rollout_ids))],
            batch_raw_reward=batch.raw_reward,
            batch_total_lengths=batch.total_lengths,
        )

    def _batch(self, fresh: list[Sample]) -> RolloutColumns:
        if self._convert is not None:
            return self._converted(self._convert, fresh)
        old = self.carried
        if old.samples:
            ids = unused_ids([s.rollout_id for s in old.samples], fill_rollout_ids([s.rollout_id for s in fresh]))
            for sample, rollout_id in zip(old.samples, ids, strict=True):
                sample.rollout_id = rollout_id
        fresh_raw, fresh_rewards = self._rewards(fresh)
        samples, raw, rewards = old.samples + fresh, old.raw_rewards + list(fresh_raw), old.rewards + [*fresh_rewards]
        with self.annotate_with_hooks():
            batch = RolloutColumns.from_train_data(build_train_data(self.args, samples, raw, rewards))
        positions = self._leftover(batch)
        self.carried = LeftoverSamples(
            [copy_sample(samples[p]) for p in positions], [raw[p] for p in positions], [rewards[p] for p in positions]
        )
        for sample, position in zip(self.carried.samples, positions, strict=True):
            sample.rollout_id = batch.rollout_ids[position]
        return batch

    def _converted(self, convert: Hook, fresh: list[Sample]) -> RolloutColumns:
        data = convert(self.args, fresh)
        if not isinstance(data, Mapping):
            raise convert.returned(data, "a dict of lists with one entry per sample")
        with convert.naming():
            data = join_rows(self.carried.rows, data)
            batch = RolloutColumns.from_train_data(data)
        self.carried = LeftoverSamples(rows=take_rows(data, self._leftover(batch), batch.rollout_ids))
        return batch

    def _leftover(self, batch: RolloutColumns) -> list[int]:
        positions = leftover_positions(batch.rollout_ids, self.args.global_batch_size)
        if 0 < len(positions) < len(batch):
            logger.info("%d samples do not fill a training step and wait for the next rollout", len(positions))
        return positions

    def _rewards(self, samples: list[Sample]) -> tuple[Sequence[Any], Sequence[float]]:
        if self._post_process is None:
            with self.annotate_with_hooks():
                return post_process_rewards(self.args, samples)
        result = self._post_process(self.args, samples)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self._post_process.returned(result, "two lists: (raw_rewards, rewards)")
        for name, values in zip(("raw_rewards", "rewards"), result, strict=True):
            if not hasattr(values, "__len__") or len(values) != len(samples):
                seen = f"{len(values)} of them" if hasattr(values, "__len__") else repr(values)
                raise ValueError(
                    f"{self._post_process} returned as {name} {seen:.80} for {len(samples)} samples; expected one per "
                    "sample, in order"
                )
        raw, rewards = (values.tolist() if hasattr(values, "tolist") else list(values) for values in result)
        with self._post_process.naming():
            return raw, [finite_reward(sample, reward) for sample, reward in zip(samples, rewards, strict=True)]

    @contextlib.contextmanager
    def annotate_with_hooks(self) -> Iterator[None]:
        """Add to an error about samples which of the user's hooks have made them what they are."""
        try:
            yield
        except (ValueError, KeyError, AssertionError) as e:
            for hook in self._sample_hooks:
                e.add_note(f"the samples were made with {hook}")
            raise

    def state(self) -> bytes | None:
        """Return what is carried over as JSON, None when that is nothing."""
        if not self.carried:
            return None
        state = {
            "samples": encode_group(self.carried.samples),
            "raw_rewards": encode_value(self.carried.raw_rewards),
            "rewards": encode_value(self.carried.rewards),
            "rows": {key: self._encoded(key, values) for key, values in self.carried.rows.items()},
        }
        return json.dumps(state).encode()

    def _encoded(self, key: str, values: list[Any]) -> Any:
        try:
            return encode_value(values)
        except NotStorable as e:
            raise NotStorable(f"{key!r} of rows that wait for a training step, made with {self._convert}: {e}") from e

    def restore(self, data: bytes | None) -> None:
        """Restore what ``state`` returned. Raises ValueError when only one of the two runs has a converter."""
        if data is None:
            self.carried = LeftoverSamples()
            return
        state = json.loads(data)
        found = LeftoverSamples(
            decode_group(state["samples"]),
            list(decode_value(state["raw_rewards"])),
            list(decode_value(state["rewards"])),
            {key: decode_value(values) for key, values in state.get("rows", {}).items()},
        )
        if found.samples if self._convert is not None else found.rows:
            without = "without" if self._convert is not None else "with"
            raise ValueError(
                f"{len(found)} samples that wait for a training step were saved {without} "
                "--custom-convert-samples-to-train-data-path; resume in the same way"
            )
        complete(found.samples, lambda: sglang_rollout.GenerateState(self.args))
        self.carried = found


def carried_over_path(root: str, rollout_id: int) -> Path:
    """Return the file of what was carried over after rollout ``rollout_id``, beside the state of the prompts."""
    return Path(root) / "rollout" / f"carried_over_{rollout_id}.json"


def write_carried_over(path: Path, data: bytes | None) -> None:
    """Write ``data`` whole, or remove the file when there is nothing to carry."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    write_atomically(path, seal(data, path.stem), durable=True)


def read_carried_over(path: Path) -> bytes | None:
    """Return what was written, None for a file that is not there. Raises ValueError for one that is damaged."""
    return unseal(path.read_bytes(), path.stem, path) if path.exists() else None


def save_dump(args: Args, name: int | str, samples: Sequence[Sample]) -> None:
    """Write ``samples`` to the path of ``--save-debug-rollout-data`` for rollout ``name``; whole or not at all."""
    assert args.save_debug_rollout_data is not None
    path = Path(args.save_debug_rollout_data.format(rollout_id=name))
    save_rollout(path, name if isinstance(name, int) else int(name.rpartition("_")[2]), samples)
    logger.info("rollout %s: %d samples written to %s", name, len(samples), path)


def load_dump(args: Args, rollout_id: int) -> list[Sample]:
    """Return the samples of the dump of ``rollout_id`` (``--load-debug-rollout-data``), or a subsample.

    Raises FileNotFoundError or ValueError, naming file and flag.
    """
    assert args.load_debug_rollout_data is not None
    path = Path(args.load_debug_rollout_data.format(rollout_id=rollout_id))
    if not path.is_file():
        raise FileNotFoundError(
            f"--load-debug-rollout-data {args.load_debug_rollout_data}: no dump of rollout {rollout_id} at {path}; "
            "lower --num-rollout, or dump that rollout with --save-debug-rollout-data"
        )
    try:
        samples = load_rollout(path, args.load_debug_rollout_data_subsample)
    except ValueError as e:
        raise ValueError(f"--load-debug-rollout-data: {e}") from e
    logger.info("rollout %d: %d samples read from %s", rollout_id, len(samples), path)
    return samples
