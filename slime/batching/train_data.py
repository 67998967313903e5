"""Finished samples -> the dict of per-sample lists that training starts from; rows of it that wait for a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat

from slime.algorithms.estimators import estimator_of
from slime.batching.columns import OBJECT_FIELDS, WHOLE_FIELDS, fill_rollout_ids
from slime.batching.errors import TrainDataError
from slime.batching.validate import IDS, OFFSETS, has_entries
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.arguments.args import Args


def build_train_data(
    args: Args, samples: Sequence[Sample], raw_rewards: Sequence[Any], rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Convert samples (n, flat) into lists of n entries under the keys every converter uses.

    Always: tokens, response_lengths, rewards, raw_reward, truncated (0/1), sample_indices, loss_masks, rollout_ids
    (some may be None), rollout_mask_sums (trained tokens of the sample's whole trajectory). When any sample has them:
    rollout_log_probs, teacher_log_probs, rollout_routed_experts, multimodal_train_inputs, metadata
    (``train_metadata``), round_number, source_names; with ``args.rollout_top_p`` below 1 also rollout_top_p_token_ids
    and _offsets, and for RLOO with a KL penalty group_indices.

    raw_rewards and rewards are before and after post-processing. A missing loss mask means all ones; ``remove_sample``
    zeroes it. ``metadata["raw_reward"]`` overrides raw rewards, for all samples as soon as one has it.

    Raises TrainDataError (a ValueError and an AssertionError) naming the sample for a reward that is no number and for
    what is missing. Lengths and values are checked in columns, where it takes no loop (``RolloutColumns``).
    """
    if not samples:
        raise TrainDataError("the rollout produced no sample to train on")
    for name, values in (("raw rewards", raw_rewards), ("rewards", rewards)):
        if len(values) != len(samples):
            raise TrainDataError(f"{len(samples)} samples but {len(values)} {name}; check the reward post-processing")
    masks = [_loss_mask(sample) for sample in samples]
    data: dict[str, list[Any]] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [finite_reward(sample, reward) for sample, reward in zip(samples, rewards, strict=True)],
        "raw_reward": _raw_rewards(args, samples, raw_rewards),
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": masks,
        "rollout_ids": [sample.rollout_id for sample in samples],
        "rollout_mask_sums": _rollout_mask_sums(samples, masks),
    }
    for field in ("rollout_log_probs", "teacher_log_probs"):
        if any(getattr(sample, field) is not None for sample in samples):
            data[field] = [_per_response_token(sample, field) for sample in samples]
    if args.rollout_top_p != 1.0:
        top_p_masks = [_top_p_mask(sample) for sample in samples]
        data[IDS] = [ids for ids, _ in top_p_masks]
        data[OFFSETS] = [offsets for _, offsets in top_p_masks]
    if any(sample.rollout_routed_experts is not None for sample in samples):
        from slime.batching.routed_experts import compact_experts, validate_routed_experts  # it needs torch

        if args.use_rollout_routing_replay:
            validate_routed_experts(args, samples)
        experts = [_present(sample, "rollout_routed_experts") for sample in samples]
        data["rollout_routed_experts"] = [compact_experts(ids, args.num_experts) for ids in experts]
    if args.kl_coef != 0 and estimator_of(args).kl == "response":
        data["group_indices"] = [sample.group_index for sample in samples]
    data.update(_optional(samples))
    return data


def describe(sample: Sample) -> str:
    """Name a sample in an error message."""
    return f"sample index={sample.index} group_index={sample.group_index} rollout_id={sample.rollout_id}"


def _optional(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    read: dict[str, Callable[[Sample], Any]] = {
        "multimodal_train_inputs": lambda sample: sample.multimodal_train_inputs,
        "metadata": lambda sample: sample.train_metadata,
        "round_number": lambda sample: (sample.metadata or {}).get("round_number"),
    }
    for key, get in read.items():
        values = [get(sample) for sample in samples]
        if any(value is not None for value in values):
            found[key] = values
    if samples[0].metadata is not None:
        found["source_names"] = [_source(sample) for sample in samples]
    return found


def _source(sample: Sample) -> str:
    own = getattr(sample, "source", None)
    return str(own if own is not None else (sample.metadata or {}).get("source_name", "unknown"))


def _loss_mask(sample: Sample) -> list[int]:
    if sample.loss_mask is None:
        mask = [1] * sample.response_length
    else:
        mask = sample.loss_mask.tolist() if hasattr(sample.loss_mask, "tolist") else sample.loss_mask
    return [0] * len(mask) if sample.remove_sample else mask


def _rollout_mask_sums(samples: Sequence[Sample], masks: Sequence[list[int]]) -> list[float]:
    own = [float(sum(mask)) for mask in masks]
    of_trajectory: dict[Hashable, float] = defaultdict(float)
    for sample, trained in zip(samples, own, strict=True):
        of_trajectory[sample.rollout_id] += trained
    pairs = zip(samples, own, strict=True)
    return [trained if s.rollout_id is None else of_trajectory[s.rollout_id] for s, trained in pairs]


def _per_response_token(sample: Sample, field: str) -> Any:
    values = getattr(sample, field)
    if values is not None:
        return values
    if any(_loss_mask(sample)):
        raise TrainDataError(
            f"{describe(sample)} has no {field} while other samples of the rollout have them; set them for all samples "
            "or for none, or set remove_sample"
        )
    return [0.0] * sample.response_length  # a sample that trains nothing needs none


def _present(sample: Sample, field: str) -> Any:
    value = getattr(sample, field)
    if value is None:
        raise TrainDataError(f"{describe(sample)} has no {field}, which the other samples or the flags require")
    return value


def finite_reward(sample: Sample, reward: SupportsFloat) -> float:
    """Return ``reward`` as a float. Raises TrainDataError, naming the sample, for what is no finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise TrainDataError(
            f"{describe(sample)}: reward {reward!r} is not a finite number (status {sample.status.value}); check the "
            "reward function, or --reward-key when it returns a dict"
        )
    return value


def _raw_rewards(args: Args, samples: Sequence[Sample], raw_rewards: Sequence[Any]) -> list[Any]:
    overrides = [(sample.metadata or {}).get("raw_reward") for sample in samples]
    if all(override is None for override in overrides):
        return [_plain_number(reward) for reward in raw_rewards]
    return [
        _plain_number(sample.get_reward_value(args) if override is None else override)
        for sample, override in zip(samples, overrides, strict=True)
    ]


def _plain_number(value: object) -> Any:
    """Return NumPy's and torch's numbers as Python's; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _top_p_mask(sample: Sample) -> tuple[Any, Any]:
    """Return (token ids, offsets) of the set that each response token was sampled from; none where none is trained."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is not None and offsets is not None:
        return ids, offsets
    if any(_loss_mask(sample)):
        raise TrainDataError(
            f"{describe(sample)} has no rollout_top_p_token_ids and _offsets: with --rollout-top-p training must know "
            "which tokens each one was sampled among. slime.rollout.sglang_rollout records them; a generate function "
            'of yours must send "custom_labels": {"slime_return_sampling_mask": "true"} and pass meta_info to '
            "Sample.append_response_tokens"
        )
    return [], [0] * (sample.response_length + 1)


Rows = dict[str, list[Any]]


def take_rows(data: Mapping[str, Any], positions: Sequence[int], rollout_ids: Sequence[int]) -> Rows:
    """Return copies of the rows at ``positions`` of train data. ``rollout_ids`` are those of all rows, as understood.

    What does not have one entry per row stays behind, and total lengths, which follow from the tokens.
    """
    if not positions:
        return {}
    per_row = {key: values for key, values in data.items() if has_entries(values, len(rollout_ids))}
    rows = {key: [_copy(values[p]) for p in positions] for key, values in per_row.items() if key != "total_lengths"}
    return rows | {"rollout_ids": [rollout_ids[p] for p in positions]}


def join_rows(waiting: Rows, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return train data of the rows that waited, then those of ``data``; rollout ids of the two do not meet.

    A column of objects that only one of them has is filled up with None. Raises TrainDataError for any other.
    """
    if not waiting or not hasattr(data.get("tokens"), "__len__"):
        return data
    count, kept = len(data["tokens"]), len(waiting["tokens"])
    fresh = {key: values for key, values in data.items() if values is not None and key != "total_lengths"}
    if not has_entries(fresh.setdefault("rollout_ids", [None] * count), count):
        return data  # which is refused as it is
    per_row = {key for key, values in fresh.items() if has_entries(values, count)}
    if uneven := (waiting.keys() ^ per_row) - {*WHOLE_FIELDS, *OBJECT_FIELDS}:
        raise TrainDataError(
            f"train data of this rollout ({count} rows) and {kept} rows that wait for a step since the last one "
            f"must have the same columns; only one of them has {', '.join(sorted(uneven))}"
        )
    filled = (waiting.keys() ^ per_row) & set(OBJECT_FIELDS)
    joined = {
        key: [*waiting.get(key, [None] * kept), *(fresh[key] if key in per_row else [None] * count)]
        for key in (waiting.keys() & per_row) | filled
    }
    ids = fill_rollout_ids(fresh["rollout_ids"])
    return fresh | joined | {"rollout_ids": [*unused_ids(waiting["rollout_ids"], ids), *ids]}


def unused_ids(rollout_ids: Sequence[Hashable], used: Sequence[int]) -> list[int]:
    """Return other ids for ``rollout_ids``, alike where those are alike, none of them ``used``."""
    lowest = min([0, *used])
    names: dict[Hashable, int] = {}
    return [names.setdefault(i, lowest - 1 - len(names)) for i in rollout_ids]


def _copy(value: object) -> Any:
    copy = getattr(value, "clone", None) or getattr(value, "copy", None)
    return copy() if copy is not None else value
