"""The contracts are not empty: hooks with the mistakes that users make break them, and the message says how."""

from __future__ import annotations

from typing import Any

import pytest

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample
from tests.plugin_contracts import (
    test_data_source,
    test_filters,
    test_generate,
    test_logging,
    test_rewards,
    test_rollout_functions,
    test_sample_hooks,
    test_train_data,
)
from tests.plugin_contracts.contract import NAMES, hook_at, subjects, unknown_names

HERE = __name__

pytestmark = pytest.mark.skipif(not subjects("ROLLOUT_FUNCTION_PATH", "ours"), reason="the user's hooks are checked")


def returns_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def one_group(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return {"sums": {"rewards": [None]}} if evaluation else [data_source.get_samples(1)[0]]


async def unfinished(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    return sample


async def torn_mask(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1]
    sample.status = Sample.Status.COMPLETED
    return sample


async def strangers(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    two = [
        Sample(index=i, group_index=sample.group_index, tokens=[1, 2], response_length=1, rollout_log_probs=[-0.1])
        for i in range(2)
    ]
    for one in two:
        one.status = Sample.Status.COMPLETED
    return two


def torn_hook(args: Any, sample: Sample, rollout_id: int) -> None:
    sample.tokens = sample.tokens[: sample.response_length]


async def one_number(args: Any, sample: Any, **kwargs: Any) -> float:
    return 1.0


async def not_a_number(args: Any, sample: Any, **kwargs: Any) -> float:
    return float("nan")


async def greedy_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    sample.response = "graded"
    return 1.0


def flat_filter(args: Any, group: Any, **kwargs: Any) -> bool:
    return bool(group[0].reward)


def keeps_all(args: Any, rollout_id: None, buffer: Any, num_samples: int) -> Any:
    return buffer[:num_samples]


def filters_by_return(args: Any, groups: Any) -> Any:
    return [group for group in groups if group[0].reward]


def shortens(args: Any, groups: Any) -> None:
    for group in groups:
        del group[0]


def tampers(args: Any, groups: Any, get_samples: Any) -> None:
    groups[0][0].tokens.append(7)


def says_logged(*args: Any) -> str:
    return "logged"


def only_rewards(args: Any, samples: Any) -> Any:
    return [0.0 for _ in samples]


def by_position(args: Any, samples: Any) -> Any:
    rewards = [[s.reward for s in samples[i : i + 4]][:4] for i in range(0, len(samples) // 4 * 4, 4)]
    flat = [r for group in rewards for r in group]
    return flat, flat


def no_masks(args: Any, samples: Any) -> Any:
    return {key: [[1, 2]] * len(samples) for key in ("tokens", "response_lengths", "rewards")}


def replaces(args: Any, rollout_id: int, rollout_data: Any) -> Any:
    return {**rollout_data}


class OneByOne(RolloutDataSource):
    def get_samples(self, num_samples: int) -> Any:
        return [sample for group in super().get_samples(num_samples) for sample in group]


class Unnumbered(RolloutDataSource):
    def get_samples(self, num_samples: int) -> Any:
        return [[Sample(prompt="x") for _ in range(2)] for _ in range(num_samples)]


class Forgetful(RolloutDataSource):
    def load(self, rollout_id: int | None = None) -> None:
        pass


class Loses(RolloutDataSourceWithBuffer):
    def add_samples(self, samples: Any) -> None:
        pass


CASES = [
    ("returns_nothing", test_rollout_functions.test_a_rollout_function_makes_what_can_be_trained_on, "source",
     "returned NoneType with evaluation=False; expected RolloutFnTrainOutput"),
    ("one_group", test_rollout_functions.test_a_rollout_function_makes_what_can_be_trained_on, "source",
     r"expected --rollout-batch-size 2 groups; got '1 groups'"),
    ("one_group", test_rollout_functions.test_an_evaluation_function_reports_data_sets, "source",
     r"rewards of data set 'sums'\[0\] to be a finite number; got None"),
    ("returns_nothing", test_generate.test_a_generate_function_works_under_the_flag_and_as_a_sample_s_own, "source",
     "returned NoneType, for sample index=0 .*expected a Sample"),
    ("unfinished", test_generate.test_a_generate_function_works_under_the_flag_and_as_a_sample_s_own, "source",
     "the status of sample index=0 to be COMPLETED, TRUNCATED or FAILED"),
    ("torn_mask", test_generate.test_a_generate_function_works_under_the_flag_and_as_a_sample_s_own, "source",
     r"loss_mask of sample index=0 to have one entry per response token \(2\)"),
    ("says_logged", test_sample_hooks.test_a_sample_hook_returns_the_sample_to_continue_with, "groups",
     "returned str 'logged', for sample index=0 .*expected a Sample, or None"),
    ("torn_hook", test_sample_hooks.test_a_sample_hook_returns_the_sample_to_continue_with, "groups",
     "response_length tokens, with at least one of the prompt"),
    ("not_a_number", test_rewards.test_a_reward_of_one_sample, "samples", "to be a finite number; got nan"),
    ("returns_nothing", test_rewards.test_a_reward_of_one_sample, "samples", "returned NoneType, .*a number or a dict"),
    ("greedy_reward", test_rewards.test_a_reward_of_one_sample, "samples", "tokens, response, status .* stay as they"),
    ("one_number", test_rewards.test_a_reward_of_a_group, "groups", "must return a list of as many rewards, got 1.0"),
    ("flat_filter", test_filters.test_a_dynamic_filter_judges_every_kind_of_group, "groups",
     r"a verdict on a group with a fan-out .*'list' object has no attribute 'reward'"),
    ("returns_nothing", test_filters.test_a_dynamic_filter_judges_every_kind_of_group, "groups", "expected a bool"),
    ("filters_by_return", test_filters.test_a_sample_filter_only_marks, "groups", "left out by remove_sample"),
    ("shortens", test_filters.test_a_sample_filter_only_marks, "groups", "groups to keep all their samples"),
    ("tampers", test_filters.test_the_hook_that_sees_all_samples, "groups source", "the samples to stay as they are"),
    ("OneByOne", test_data_source.test_a_data_source_hands_out_numbered_groups, "", "expected a list of groups"),
    ("Unnumbered", test_data_source.test_a_data_source_hands_out_numbered_groups, "", "an index of its own per sample"),
    ("Forgetful", test_data_source.test_a_data_source_resumes_where_it_was_saved, "", "to go on with the prompt after"),
    ("Loses", test_data_source.test_groups_that_are_handed_back_come_again, "", "must not be lost"),
    ("keeps_all", test_data_source.test_a_buffer_filter_takes_out_what_it_returns, "source",
     "to be removed from the buffer"),
    ("says_logged", test_logging.test_a_rollout_log_function, "samples", r"True \(leave the built-in .*got 'logged'"),
    ("only_rewards", test_train_data.test_reward_post_processing_gives_two_lists, "samples", "a tuple of two lists"),
    ("by_position", test_train_data.test_reward_post_processing_gives_two_lists, "samples", "any number of samples"),
    ("no_masks", test_train_data.test_a_converter_gives_what_training_needs, "samples", "got 'no loss_masks'"),
    ("replaces", test_train_data.test_the_hook_on_the_trainer_s_columns_changes_them_in_place, "samples",
     "None: the dict is changed in place"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "contract", "needs", "message"), CASES, ids=[f"{c[0]}-{c[1].__name__}" for c in CASES]
)
def test_the_error_of_a_broken_hook_names_what_is_expected(name, contract, needs, message, request):
    wanted = {fixture: request.getfixturevalue(fixture) for fixture in ["args", *needs.split()]}
    if contract is test_sample_hooks.test_a_sample_hook_returns_the_sample_to_continue_with:
        wanted["evaluation"] = False
    with pytest.raises((AssertionError, TypeError, ValueError), match=message) as caught:
        contract(f"{HERE}.{name}", **wanted)
    assert f"{HERE}.{name}" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("evaluation", [False, True])
def test_siblings_without_a_common_rollout_id_break_the_contract(evaluation, args, source):
    with pytest.raises(AssertionError, match="samples of one trajectory to share a rollout_id that is set"):
        test_generate.test_a_generate_function_fills_the_sample(f"{HERE}.strangers", evaluation, args, source)


def test_every_name_of_the_environment_is_checked_somewhere():
    modules = (
        test_data_source, test_filters, test_generate, test_logging, test_rewards, test_rollout_functions,
        test_sample_hooks, test_train_data,
    )  # fmt: skip
    texts = [open(module.__file__).read() for module in modules]  # noqa: SIM115
    assert [name for name in NAMES if not any(f'"{name}"' in text for text in texts)] == []


def test_names_of_the_environment(monkeypatch):
    monkeypatch.setenv("SLIME_CONTRACT_CUSTOM_RM", "my.reward")
    assert unknown_names() == ["SLIME_CONTRACT_CUSTOM_RM is no contract; did you mean SLIME_CONTRACT_CUSTOM_RM_PATH?"]
    monkeypatch.delenv("SLIME_CONTRACT_CUSTOM_RM")
    monkeypatch.setenv("SLIME_CONTRACT_CUSTOM_RM_PATH", "my.reward")
    assert unknown_names() == []
    assert subjects("CUSTOM_RM_PATH", "ours.a", "ours.b") == ["my.reward"]
    assert subjects("DATA_SOURCE_PATH", "ours.c") == []  # the user asked for another one
    with pytest.raises(ImportError, match=r"--custom-rm-path 'my.reward': there is no module 'my'"):
        hook_at("CUSTOM_RM_PATH", "my.reward")
