"""``--custom-rm-path``, for one sample and with ``--group-rm`` for a group."""

from __future__ import annotations

import copy
import os

import pytest

from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.async_utils import run
from tests.plugin_contracts.contract import EXAMPLES, PREFIX, fingerprint, hook_at, must, must_be_finite, subjects

NAME = "CUSTOM_RM_PATH"
BOTH = [f"{EXAMPLES}.length_reward", f"{EXAMPLES}.plain_reward"]
GROUP_RM = os.environ.get(PREFIX + "GROUP_RM", "").lower()
ONE_BY_ONE = subjects(NAME, *BOTH, "examples.quickstart.reward.exact_answer") if GROUP_RM not in ("1", "true") else []
TOGETHER = subjects(NAME, *BOTH) if GROUP_RM in ("1", "true") or not os.environ.get(PREFIX + NAME) else []


def numbers(args, samples, rewards):
    """Return the numbers that training would take from the rewards."""
    scored = copy.deepcopy(samples)
    for sample, reward in zip(scored, rewards, strict=True):
        sample.reward = reward
    return [sample.get_reward_value(args) for sample in scored]


@pytest.mark.parametrize("path", ONE_BY_ONE)
def test_a_reward_of_one_sample(path, args, samples):
    hook = hook_at(NAME, path)
    args.custom_rm_path = path
    before = fingerprint(samples)
    for sample in samples:
        sample.reward = None
    rewards = [run(async_rm(args, sample)) for sample in samples]
    must_be_finite(hook, numbers(args, samples, rewards), "the reward, or its --reward-key, of sample ")
    must(fingerprint(samples) == before, hook, "tokens, response, status and ids of the sample to stay as they are")


@pytest.mark.parametrize("path", TOGETHER)
def test_a_reward_of_a_group(path, args, groups):
    hook = hook_at(NAME, path)
    args.custom_rm_path, args.group_rm = path, True
    for group in (*groups, groups[0] + groups[1], groups[0][:1]):
        before = fingerprint(group)
        for sample in group:
            sample.reward = None
        rewards = run(batched_async_rm(args, group))
        must_be_finite(hook, numbers(args, group, rewards), "the list of rewards, one per sample, ")
        must(fingerprint(group) == before, hook, "tokens, response, status and ids of samples to stay as they are")
