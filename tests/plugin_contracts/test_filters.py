"""Hooks that choose: the dynamic sampling filter, the sample filter, the hook that sees all samples."""

from __future__ import annotations

import copy

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from tests.plugin_contracts.contract import EXAMPLES, fingerprint, hook_at, must, subjects

HUB = "slime.rollout.filter_hub.dynamic_sampling_filters"


@pytest.mark.parametrize(
    "path",
    subjects(
        "DYNAMIC_SAMPLING_FILTER_PATH", f"{HUB}.check_reward_nonzero_std",
        f"{HUB}.check_reward_nonzero_std_with_fallback", f"{EXAMPLES}.not_too_easy",
    ),
)  # fmt: skip
def test_a_dynamic_filter_judges_every_kind_of_group(path, args, groups):
    hook = hook_at("DYNAMIC_SAMPLING_FILTER_PATH", path)
    equal = copy.deepcopy(groups[0])
    for sample in equal:
        sample.reward = copy.deepcopy(groups[0][1].reward)
    kinds = {
        "rewards that differ": groups[0],
        "equal rewards": equal,
        "one sample": groups[0][:1],
        "a fan-out (lists within the group)": [[copy.deepcopy(groups[0][0]), groups[0][0]], [groups[0][1]]],
    }
    for kind, group in kinds.items():
        before = fingerprint(group)
        try:
            verdict = call_dynamic_filter(hook, args, group)
        except Exception as e:  # noqa: BLE001  (reported as what it is: a broken contract)
            must(False, hook, f"a verdict on a group with {kind}", e)
        must(isinstance(verdict, DynamicFilterOutput), hook, "a bool or a DynamicFilterOutput", verdict)
        must(
            verdict.reason is None or isinstance(verdict.reason, str), hook,
            "the reason to be a string: it becomes the name of a metric", verdict.reason,
        )  # fmt: skip
        must(fingerprint(group) == before, hook, "the samples to stay as they are")


@pytest.mark.parametrize("path", subjects("ROLLOUT_SAMPLE_FILTER_PATH", f"{EXAMPLES}.drop_truncated"))
def test_a_sample_filter_only_marks(path, args, groups):
    hook = hook_at("ROLLOUT_SAMPLE_FILTER_PATH", path)
    before, shape = fingerprint(groups), [len(group) for group in groups]
    result = hook(args, groups)
    must(result is None, hook, "None: samples are left out by remove_sample, what is returned is ignored", result)
    must([len(group) for group in groups] == shape, hook, "groups to keep all their samples", list(map(len, groups)))
    must(fingerprint(groups) == before, hook, "nothing but remove_sample to change")
    for sample in iter_samples(groups):
        must(isinstance(sample.remove_sample, bool), hook, "remove_sample to be a bool", sample.remove_sample)


@pytest.mark.parametrize("path", subjects("ROLLOUT_ALL_SAMPLES_PROCESS_PATH", f"{EXAMPLES}.count_groups"))
def test_the_hook_that_sees_all_samples(path, args, groups, source):
    hook = hook_at("ROLLOUT_ALL_SAMPLES_PROCESS_PATH", path)
    before = fingerprint(groups)
    result = hook(args, groups, source.get_samples)
    must(result is None, hook, "None: what is returned is ignored", result)
    must(fingerprint(groups) == before, hook, "the samples to stay as they are: they are trained on")
