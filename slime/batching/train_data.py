"""Finished samples -> the dict of per-sample lists that training starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError
from slime.batching.rollout_ids import fill_rollout_ids, mask_sums_by_rollout
from slime.batching.routed_experts import compact_experts, validate_routed_experts
from slime.utils.types import Sample


def build_train_data(
    args: Any, samples: Sequence[Sample], raw_rewards: Sequence[Any], rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Convert samples (n, flat) into lists of n entries under the keys every converter uses.

    Always: tokens, response_lengths, rewards, raw_reward, truncated (0/1), sample_indices, loss_masks, rollout_ids,
    rollout_mask_sums (trained tokens of the sample's whole rollout). When any sample has them: rollout_log_probs,
    teacher_log_probs, rollout_routed_experts, multimodal_train_inputs, metadata (``train_metadata``), round_number,
    source_names; with ``args.rollout_top_p`` below 1 also rollout_top_p_token_ids and _offsets, and for RLOO with a KL
    penalty group_indices.

    raw_rewards and rewards are before and after post-processing. A missing loss mask means all ones; ``remove_sample``
    zeroes it. ``metadata["raw_reward"]`` overrides raw rewards, for all samples as soon as one has it.

    Raises TrainDataError (a ValueError and an AssertionError) naming the sample for a mask, log-prob list or reward
    that cannot be right.
    """
    if not samples:
        raise TrainDataError("the rollout produced no sample to train on")
    for name, values in (("raw rewards", raw_rewards), ("rewards", rewards)):
        if len(values) != len(samples):
            raise TrainDataError(f"{len(samples)} samples but {len(values)} {name}; check the reward post-processing")
    masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = fill_rollout_ids([sample.rollout_id for sample in samples])
    own_sums = np.array([sum(mask) for mask in masks], dtype=np.float64)
    data: dict[str, list[Any]] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [_response_length(sample) for sample in samples],
        "rewards": [finite_reward(sample, reward) for sample, reward in zip(samples, rewards, strict=True)],
        "raw_reward": _raw_rewards(args, samples, raw_rewards),
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": masks,
        "rollout_ids": list(rollout_ids),
        "rollout_mask_sums": mask_sums_by_rollout(rollout_ids, own_sums).tolist(),
    }
    for field in ("rollout_log_probs", "teacher_log_probs"):
        if any(getattr(sample, field) is not None for sample in samples):
            data[field] = [_per_response_token(sample, field) for sample in samples]
    if args.rollout_top_p != 1.0:
        data.update(_top_p(samples))
    if any(sample.rollout_routed_experts is not None for sample in samples):
        if args.use_rollout_routing_replay:
            validate_routed_experts(args, samples)
        experts = [_present(sample, "rollout_routed_experts") for sample in samples]
        data["rollout_routed_experts"] = [compact_experts(ids, args.num_experts) for ids in experts]
    if args.advantage_estimator == "rloo" and args.kl_coef != 0:
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


def _response_length(sample: Sample) -> int:
    if not 0 <= sample.response_length < len(sample.tokens):
        raise TrainDataError(
            f"{describe(sample)}: response_length {sample.response_length} with {len(sample.tokens)} tokens; expected "
            "tokens = prompt + response with at least one prompt token. Check the generate function"
        )
    return sample.response_length


def _loss_mask(sample: Sample) -> list[int]:
    if sample.loss_mask is None:
        mask = [1] * sample.response_length
    else:
        mask = sample.loss_mask.tolist() if hasattr(sample.loss_mask, "tolist") else sample.loss_mask
    if len(mask) != sample.response_length:
        raise TrainDataError(
            f"{describe(sample)}: loss mask length {len(mask)} != response length {sample.response_length}; the mask "
            "has one entry per response token, tool text included"
        )
    return [0] * len(mask) if sample.remove_sample else mask


def _per_response_token(sample: Sample, field: str) -> Any:
    values = getattr(sample, field)
    if values is None:
        # a sample that trains nothing needs no log-probs; zeros keep the columns rectangular
        if not any(_loss_mask(sample)):
            return [0.0] * sample.response_length
        raise TrainDataError(
            f"{describe(sample)} has no {field} while other samples of the rollout have them; set them for all samples "
            "or for none, or set remove_sample"
        )
    if len(values) != sample.response_length:
        raise TrainDataError(
            f"{describe(sample)}: {field} has {len(values)} entries, expected one per response token "
            f"({sample.response_length})"
        )
    return values


def _present(sample: Sample, field: str) -> Any:
    value = getattr(sample, field)
    if value is None:
        raise TrainDataError(f"{describe(sample)} has no {field}, which the other samples or the flags require")
    return value


def finite_reward(sample: Sample, reward: Any) -> float:
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


def _raw_rewards(args: Any, samples: Sequence[Sample], raw_rewards: Sequence[Any]) -> list[Any]:
    overrides = [(sample.metadata or {}).get("raw_reward") for sample in samples]
    if all(override is None for override in overrides):
        return [_plain_number(reward) for reward in raw_rewards]
    return [
        _plain_number(sample.get_reward_value(args) if override is None else override)
        for sample, override in zip(samples, overrides, strict=True)
    ]


def _plain_number(value: Any) -> Any:
    """Return NumPy's and torch's numbers as Python's; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _top_p(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    masks = [_top_p_mask(sample) for sample in samples]
    return {
        "rollout_top_p_token_ids": [ids for ids, _ in masks],
        "rollout_top_p_token_offsets": [offsets for _, offsets in masks],
    }


def _top_p_mask(sample: Sample) -> tuple[Any, Any]:
    """Return (token ids, offsets) that say what each response token was sampled among; none where none is trained."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or offsets is None:
        if not any(_loss_mask(sample)):
            return [], [0] * (sample.response_length + 1)
        raise TrainDataError(
            f"{describe(sample)} has no rollout_top_p_token_ids and _offsets: with --rollout-top-p training must know "
            "which tokens each one was sampled among. slime.rollout.sglang_rollout records them; a generate function "
            'of yours must send "custom_labels": {"slime_return_sampling_mask": "true"} and pass meta_info to '
            "Sample.append_response_tokens"
        )
    if len(offsets) != sample.response_length + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(ids):
        raise TrainDataError(
            f"{describe(sample)}: top-p offsets must be {sample.response_length + 1} entries from 0 to {len(ids)},"
            f" got {len(offsets)} entries from {offsets[0]} to {offsets[-1]}"
        )
    return ids, offsets
