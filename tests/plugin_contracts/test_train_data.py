"""From samples to training data: reward post-processing, conversion, and the trainers' hook on their columns."""

from __future__ import annotations

import pytest
import torch

from slime.batching.columns import RolloutColumns
from slime.batching.validate import REQUIRED_KEYS
from slime.ray.manager.conversion import Converter
from tests.plugin_contracts.contract import EXAMPLES, hook_at, must, must_be_finite, subjects

ONE_RANK = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


@pytest.mark.parametrize(
    "path",
    subjects(
        "CUSTOM_REWARD_POST_PROCESS_PATH", "slime.algorithms.rewards.post_process_rewards",
        f"{EXAMPLES}.centered_rewards", "examples.quickstart.reward.shuffled_rewards",
    ),
)  # fmt: skip
def test_reward_post_processing_gives_two_lists(path, args, samples):
    hook = hook_at("CUSTOM_REWARD_POST_PROCESS_PATH", path)
    result = hook(args, samples)
    must(isinstance(result, tuple) and len(result) == 2, hook, "a tuple of two lists: raw rewards, rewards", result)
    for name, values in zip(("raw_rewards", "rewards"), result, strict=True):
        must(len(values) == len(samples), hook, f"{name} to have one entry per sample ({len(samples)})", values)
    must_be_finite(hook, result[1], "rewards")
    odd = hook(args, samples[:3])  # groups that are not complete
    must(len(odd[1]) == 3, hook, "any number of samples to be taken: filters and fan-outs change it", odd)


@pytest.mark.parametrize("path", subjects("CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH", f"{EXAMPLES}.convert"))
def test_a_converter_gives_what_training_needs(path, args, samples):
    hook = hook_at("CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH", path)
    data = hook(args, samples)
    must(isinstance(data, dict), hook, "a dict of lists", data)
    missing = [key for key in REQUIRED_KEYS if key not in data]
    must(not missing, hook, f"the keys {', '.join(REQUIRED_KEYS)}", f"no {', '.join(missing)}")
    for key, values in data.items():
        must(
            hasattr(values, "__len__") and len(values) == len(data["tokens"]), hook,
            f"{key!r} to have one entry per sample ({len(data['tokens'])})", values,
        )  # fmt: skip
    try:
        RolloutColumns.from_train_data(data)
    except ValueError as e:
        must(False, hook, "data that can be trained on", str(e))
    args.custom_convert_samples_to_train_data_path = path
    converter = Converter(args)
    converter.train_parallel_config = ONE_RANK
    (shard,) = converter.shards(samples)
    assert len(shard) + len(converter.carried) == len(data["tokens"])


@pytest.mark.parametrize("path", subjects("ROLLOUT_DATA_POSTPROCESS_PATH", f"{EXAMPLES}.clip_advantages"))
def test_the_hook_on_the_trainer_s_columns_changes_them_in_place(path, args, samples):
    hook = hook_at("ROLLOUT_DATA_POSTPROCESS_PATH", path)
    converter = Converter(args)
    converter.train_parallel_config = ONE_RANK
    (shard,) = converter.shards(samples)
    data = shard.to_rollout_data()
    for name in ("log_probs", "advantages", "returns", "kl"):
        data[name] = [torch.linspace(-2, 2, n) for n in data["response_lengths"]]
    keys, shapes = set(data), [len(values) for values in data["advantages"]]
    result = hook(args, 0, data)
    must(result is None, hook, "None: the dict is changed in place", result)
    must(keys <= set(data), hook, "no column to disappear", sorted(keys - set(data)))
    for name in ("advantages", "returns", "loss_masks"):
        found = [len(values) for values in data[name]]
        must(found == shapes, hook, f"{name} to keep one value per response token of every sample", found)
        must(all(torch.is_tensor(values) for values in data[name]), hook, f"{name} to be a list of tensors")
