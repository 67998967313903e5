"""Advantages of responses with tool text, as the ranks of a layout compute them: Megatron's groups, no model."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.support.ranks import switch_layout
from tests.support.trainer import make_shards, make_train_data, trainer_args

FLAGS = {"kl_coef": 0.3, "kl_loss_type": "k1", "gamma": 0.9, "lambd": 0.8}
PER_TOKEN = ("values", "log_probs", "ref_log_probs")


def tool_data(seed: int) -> dict[str, list[Any]]:
    """Return train data of eight samples whose responses are turns and tool text of random lengths.

    Every response has a trained token but one; some end in tool text. Values and log-probs, per response token, have
    placeholders at tool text.
    """
    data, rng = make_train_data(seed=seed, longest=40), random.Random(seed)
    masks = [_turns(rng, length) for length in data["response_lengths"]]
    silent = rng.randrange(len(masks))
    masks[silent] = [0] * len(masks[silent])
    data["loss_masks"], data["rollout_mask_sums"] = masks, [float(sum(mask)) for mask in masks]
    placeholders = {"values": 1e6, "log_probs": 0.0, "ref_log_probs": float("-inf")}
    for name in PER_TOKEN:
        data[name] = [[rng.gauss(0, 1) if on else placeholders[name] for on in mask] for mask in masks]
    return data


def _turns(rng: random.Random, length: int) -> list[int]:
    mask: list[int] = []
    while len(mask) < length:
        mask += [1] * rng.randint(1, 4) + [0] * rng.randint(0, 6)
    return mask[:length]


def estimates(checkpoint: str, layouts: list[dict[str, Any]], seeds: list[int]) -> list[dict[Any, Any]]:
    """Per layout: (seed, estimator, column, sample index) -> whole response, on the ranks of the last stage."""
    from slime.backends.megatron_utils.train.trainer import MegatronTrainer

    found = []
    for layout in layouts:
        args = trainer_args(checkpoint, **FLAGS, **layout)
        switch_layout(args)
        config = MegatronTrainer(args)._describe_parallelism()
        found.append({key: v for seed in seeds for key, v in _of_seed(args, config, seed).items()})
    return found


def _of_seed(args: Any, config: dict[str, int], seed: int) -> dict[Any, torch.Tensor]:
    from slime.backends.megatron_utils.state.parallel import is_last_stage
    from slime.backends.megatron_utils.train.cp_utils import all_gather_with_cp, slice_samples_with_cp
    from slime.backends.megatron_utils.train.data import prepare_rollout_data
    from slime.backends.megatron_utils.train.loss import compute_advantages_and_returns

    whole = tool_data(seed)
    shard = make_shards(args, {k: v for k, v in whole.items() if k not in PER_TOKEN}, config)[config["dp_rank"]]
    found = {}
    for estimator in ("ppo", "reinforce_plus_plus"):
        data = prepare_rollout_data(args, shard, torch.device("cpu"))
        lengths = (data["total_lengths"], data["response_lengths"])
        for name in PER_TOKEN:
            rows = [whole[name][index - 100] for index in data["sample_indices"]]
            data[name] = slice_samples_with_cp([torch.tensor(row, dtype=torch.float64) for row in rows], *lengths)
        args.advantage_estimator = estimator
        compute_advantages_and_returns(args, data)
        for name in ("advantages", "returns") if is_last_stage() else ():
            for index, local, *sizes in zip(data["sample_indices"], data[name], *lengths, strict=True):
                found[seed, estimator, name, int(index)] = all_gather_with_cp(local, *sizes)
    return found
