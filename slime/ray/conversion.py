"""From the samples of a rollout to one shard of columns per data-parallel rank."""

from __future__ import annotations

import contextlib
import json
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.algorithms.rewards import post_process_rewards
from slime.batching.columns import RolloutBatch, RolloutShard
from slime.batching.schedule import build_dp_schedule, leftover_positions
from slime.batching.train_data import build_train_data, finite_reward
from slime.rollout.durable.state_codec import decode_group, decode_value, encode_group, encode_value
from slime.rollout.hooks.hook import Hook, find_hook, find_hooks
from slime.utils.atomic_file import write_atomically
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_MAKERS = (
    "rollout_function_path",
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "custom_rm_path",
    "rollout_sample_filter_path",
)


@dataclass
class CarriedOver:
    """Samples whose rollouts did not fill a training step; they come first in the next one. Rewards are final."""

    samples: list[Sample]
    raw_rewards: list[Any]
    rewards: list[float]


class Converter:
    """Turns each rollout into shards. Samples beyond the last whole step wait for the next rollout, in order."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.train_parallel_config: Mapping[str, int] | None = None
        self.carried = CarriedOver([], [], [])
        self._convert = find_hook(args, "custom_convert_samples_to_train_data_path")
        self._post_process = find_hook(args, "custom_reward_post_process_path")
        makers = [] if getattr(args, "load_debug_rollout_data", None) else find_hooks(args, *_MAKERS)
        self._makers = [hook for hook in makers if not hook.path.startswith("slime.")]

    def shards(self, samples: Sequence[Sample]) -> list[RolloutShard]:
        """Return one shard per data-parallel rank of what ``samples``, after those carried over, train.

        Raises TrainDataError or ScheduleError naming what cannot be right.
        """
        if self.train_parallel_config is None:
            raise RuntimeError("the trainers have not told their parallel layout yet (set_train_parallel_config)")
        batch = self._batch(list(samples))
        schedule = build_dp_schedule(
            self.args,
            self.train_parallel_config,
            batch.total_lengths.tolist(),
            global_batch_size=self.args.global_batch_size,
            rollout_indices=batch.rollout_ids,
        )
        return batch.shards(schedule)

    def _batch(self, fresh: list[Sample]) -> RolloutBatch:
        old = self.carried
        raw: list[Any]
        rewards: list[float]
        if self._convert is not None:
            samples = old.samples + fresh
            batch = self._converted(self._convert, samples)
            raw, rewards = [0.0] * len(samples), [0.0] * len(samples)  # the converter makes its own
        else:
            fresh_raw, fresh_rewards = self._rewards(fresh)
            samples = old.samples + fresh
            raw, rewards = old.raw_rewards + list(fresh_raw), old.rewards + list(fresh_rewards)
            with self.naming_makers():
                batch = RolloutBatch.from_train_data(build_train_data(self.args, samples, raw, rewards))
        self._carry_over(samples, raw, rewards, batch)
        return batch

    def _converted(self, convert: Hook, samples: list[Sample]) -> RolloutBatch:
        data = convert(self.args, samples)
        if not isinstance(data, Mapping):
            raise convert.returned(data, "a dict of lists with one entry per sample")
        with convert.naming():
            return RolloutBatch.from_train_data(data)

    def _rewards(self, samples: list[Sample]) -> tuple[Sequence[Any], Sequence[float]]:
        if self._post_process is None:
            with self.naming_makers():
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
    def naming_makers(self) -> Iterator[None]:
        """Add to an error about samples which of the user's hooks have made them what they are."""
        try:
            yield
        except (ValueError, KeyError, AssertionError) as e:
            for hook in self._makers:
                e.add_note(f"the samples were made with {hook}")
            raise

    def _carry_over(self, samples: list[Sample], raw: list[Any], rewards: list[Any], batch: RolloutBatch) -> None:
        ids = batch.rollout_ids
        positions = leftover_positions(ids, self.args.global_batch_size)
        if positions and len(ids) != len(samples):
            logger.warning(
                "%d of the %d rows that --custom-convert-samples-to-train-data-path made of %d samples do not fill a "
                "training step and are dropped; one row per sample, in order, would wait for the next rollout",
                len(positions),
                len(ids),
                len(samples),
            )
            positions = []
        elif positions and len(positions) < len(samples):
            logger.info("%d samples do not fill a training step and wait for the next rollout", len(positions))
        # Ids of their own, which no later rollout uses: rollout ids are unique within a rollout only.
        names: dict[int, int] = {}
        for position in positions:
            samples[position].rollout_id = names.setdefault(ids[position], -1 - len(names))
        self.carried = CarriedOver(
            [samples[p] for p in positions], [raw[p] for p in positions], [rewards[p] for p in positions]
        )

    def state(self) -> bytes | None:
        """Return what is carried over as JSON, None when that is nothing."""
        if not self.carried.samples:
            return None
        state = {
            "samples": encode_group(self.carried.samples),
            "raw_rewards": encode_value(self.carried.raw_rewards),
            "rewards": encode_value(self.carried.rewards),
        }
        return json.dumps(state).encode()

    def restore(self, data: bytes | None) -> None:
        """Undo ``state``."""
        state = json.loads(data) if data else {"samples": [], "raw_rewards": [], "rewards": []}
        self.carried = CarriedOver(
            decode_group(state["samples"]),
            list(decode_value(state["raw_rewards"])),
            list(decode_value(state["rewards"])),
        )


def carried_over_path(root: str, rollout_id: int) -> Path:
    """Return the file of what was carried over after rollout ``rollout_id``, beside the state of the prompts."""
    return Path(root) / "rollout" / f"carried_over_{rollout_id}.json"


def write_carried_over(path: Path, data: bytes | None) -> None:
    """Write ``data`` whole, or remove the file when there is nothing to carry."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    write_atomically(path, data, durable=True)
