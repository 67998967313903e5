"""Metrics of rollouts, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.ray.manager.rollout_metrics import (
    asked_for_metrics,
    eval_metrics,
    eval_summary,
    headline,
    is_repetitive,
    pass_rates,
    rollout_metrics,
    statistics,
)
from slime.utils.types import Sample
from tests.support.arguments import run_args


def args(**changes):
    return run_args(**{"rollout_num_gpus": 2, **changes})


def sample(group, reward, length, *, status=Sample.Status.COMPLETED, mask=None, elsewhere=0.0, versions=()):
    return Sample(
        group_index=group,
        reward=reward,
        response_length=length,
        loss_mask=mask,
        status=status,
        non_generation_time=elsewhere,
        weight_versions=list(versions),
    )


def test_lengths_truncation_groups_and_speed():
    samples = [
        sample(0, 1.0, 4),
        sample(0, 1.0, 8, status=Sample.Status.TRUNCATED),
        sample(1, 0.0, 6, mask=[1, 1, 0, 0, 0, 0]),
        sample(1, 1.0, 2),
    ]
    found = rollout_metrics(args(), samples, seconds=2.0)
    assert found["rollout/response_len/mean"] == (4 + 8 + 2 + 2) / 4  # the third has two trained tokens
    assert found["rollout/response_len/median"] == 3.0
    assert found["rollout/response_len/max"] == 8
    assert found["rollout/response_len/min"] == 2
    assert found["rollout/truncated_ratio"] == 0.25
    assert found["rollout/zero_std/count_1.0"] == 1.0
    assert "rollout/zero_std/count_0.0" not in found
    assert found["perf/rollout_time"] == 2.0
    assert found["perf/tokens_per_gpu_per_sec"] == 20 / 2 / 2
    assert found["perf/effective_tokens_per_gpu_per_sec"] == 16 / 2 / 2
    assert found["perf/longest_sample_tokens_per_sec"] == 4.0
    assert "perf/non_generation_time/mean" not in found


def test_a_group_of_one_and_samples_without_group_do_not_count_as_equal():
    found = rollout_metrics(args(), [sample(0, 1.0, 1), sample(None, 1.0, 1), sample(None, 1.0, 1)], seconds=1.0)
    assert not [name for name in found if "zero_std" in name]


def test_time_in_tools_is_taken_off_the_longest_sample():
    found = rollout_metrics(args(), [sample(0, 1.0, 10, elsewhere=3.0), sample(0, 0.0, 2)], seconds=5.0)
    assert found["perf/non_generation_time/max"] == 3.0
    assert found["perf/longest_sample_non_generation_time"] == 3.0
    assert found["perf/longest_sample_tokens_per_sec_without_non_generation"] == 10 / (5.0 - 3.0)


def test_weight_versions_and_cache():
    samples = [sample(0, 1.0, 1, versions=["3"]), sample(0, 1.0, 1, versions=["4", "5"])]
    samples[0].prefix_cache_info.cached_tokens = 6
    samples[0].prefix_cache_info.total_prompt_tokens = 8
    samples[1].prefix_cache_info.total_prompt_tokens = 8
    found = rollout_metrics(args(), samples, seconds=1.0)
    assert (found["rollout/weight_version/min"], found["rollout/weight_version/max"]) == (3.0, 5.0)
    assert found["rollout/prefix_cache_hit_rate"] == 6 / 16
    assert found["rollout/avg_cached_tokens_per_sample"] == 3.0


def test_reward_categories():
    samples = [sample(0, {"score": 1.0, "kind": "ok"}, 1), sample(0, {"score": 0.0, "kind": "format"}, 1)]
    found = rollout_metrics(args(reward_key="score", log_reward_category="kind"), samples, seconds=1.0)
    assert found["rollout/error_cat/ok"] == 0.5
    assert found["rollout/error_cat/format"] == 0.5


def test_evaluation():
    samples = [sample(0, 1.0, 3), sample(0, 0.0, 5)]
    data = {"sums": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": samples}}
    found = eval_metrics(args(log_passrate=True), data)
    assert found["eval/sums"] == 0.5
    assert found["eval/sums-truncated_ratio"] == 0.5
    assert found["eval/sums/response_len/mean"] == 4.0
    assert found["eval/sums-pass@1"] == 0.5
    assert found["eval/sums-pass@2"] == 1.0


def test_an_empty_evaluation_set_is_named():
    with pytest.raises(ValueError, match=r"'sums'.*got none"):
        eval_metrics(args(), {"sums": {"rewards": [], "samples": []}})


def test_pass_rates_equal_a_count_over_all_subsets():
    rng = random.Random(0)
    groups = [[rng.randint(0, 1) for _ in range(4)] for _ in range(5)]
    found = pass_rates(groups)
    assert set(found) == {"pass@1", "pass@2", "pass@4"}
    for k in (1, 2, 4):
        shares = []
        for group in groups:
            subsets = list(itertools.combinations(group, k))
            shares.append(sum(1 in subset for subset in subsets) / len(subsets))
        assert found[f"pass@{k}"] == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_statistics_of_an_even_and_an_odd_count():
    assert statistics([3, 1, 2], "a/") == {"a/mean": 2.0, "a/median": 2.0, "a/max": 3.0, "a/min": 1.0}
    assert statistics([4, 1], "")["median"] == 2.5


def test_repetition():
    rng = random.Random(0)
    assert is_repetitive("the same again. " * 1000)
    assert is_repetitive("\ud83d" * 12_000)  # halves of surrogate pairs
    assert not is_repetitive("".join(rng.choice("abcdefghij ") for _ in range(12_000)))
    assert not is_repetitive("the same again. " * 100)  # short texts are never called repetitive


def hand_made():
    """Two prompts, in shuffled order: 0 with three trajectories, of which one made two samples; 1 with two.

    index  group  trajectory  reward  response  trained  elsewhere  status     category
    0      0      own        1       10        10       2.0        truncated  ok
    1      0      7          0       4         4        0.0        completed  format
    2      0      7          1       10        3        4.0        completed  ok
    3      0      own        1       6         6        0.0        completed  ok
    4      1      own        0       10        10       0.0        completed  wrong
    5      1      own        0       0         0        0.0        truncated  wrong
    """
    rows = [
        (0, 0, None, 1.0, 10, None, 2.0, "truncated", "ok"),
        (1, 0, 7, 0.0, 4, [1] * 4, 0.0, "completed", "format"),
        (2, 0, 7, 1.0, 10, [1] * 3 + [0] * 7, 4.0, "completed", "ok"),
        (3, 0, None, 1.0, 6, None, 0.0, "completed", "ok"),
        (4, 1, None, 0.0, 10, None, 0.0, "completed", "wrong"),
        (5, 1, None, 0.0, 0, None, 0.0, "truncated", "wrong"),
    ]
    samples = [
        Sample(
            index=index, group_index=group, rollout_id=trajectory, reward={"score": reward, "kind": kind},
            response_length=length, loss_mask=mask, non_generation_time=elsewhere, status=Sample.Status(status),
            metadata={"round_number": index + 1}, response="x" * length, weight_versions=[str(index)],
        )
        for index, group, trajectory, reward, length, mask, elsewhere, status, kind in rows
    ]  # fmt: skip
    for number, s in enumerate(samples):
        s.spec_info.spec_draft_token_num, s.spec_info.spec_accept_token_num = 4, number % 2
        s.spec_info.spec_verify_ct, s.spec_info.completion_token_num = 2, 5
        s.prefix_cache_info.cached_tokens, s.prefix_cache_info.total_prompt_tokens = number, 10
    return [samples[i] for i in (4, 1, 0, 5, 3, 2)]


BY_HAND = {
    # trained tokens 10 4 3 6 10 0
    "rollout/response_len/mean": 33 / 6, "rollout/response_len/median": 5.0,
    "rollout/response_len/max": 10.0, "rollout/response_len/min": 0.0,
    "rollout/truncated_ratio": 2 / 6, "rollout/repetition_frac": 0.0,
    "rollout/spec_accept_rate": 3 / 24, "rollout/spec_accept_length": 30 / 12,
    "rollout/prefix_cache_hit_rate": 15 / 60, "rollout/avg_cached_tokens_per_sample": 15 / 6,
    "rollout/weight_version/min": 0.0, "rollout/weight_version/max": 5.0,
    "rollout/error_cat/ok": 3 / 6, "rollout/error_cat/format": 1 / 6, "rollout/error_cat/wrong": 2 / 6,
    "rollout/zero_std/count_0.0": 1.0,
    # 40 response tokens, 33 trained, in 20 s on 2 slots; the longest have 10: responses 0, 2, 4; trained 0, 4
    "perf/rollout_time": 20.0,
    "perf/non_generation_time/mean": 1.0, "perf/non_generation_time/median": 0.0,
    "perf/non_generation_time/max": 4.0, "perf/non_generation_time/min": 0.0,
    "perf/tokens_per_gpu_per_sec": 1.0, "perf/effective_tokens_per_gpu_per_sec": 33 / 40,
    "perf/longest_sample_tokens_per_sec": 0.5, "perf/longest_effective_sample_tokens_per_sec": 0.5,
    "perf/longest_sample_non_generation_time": 2.0, "perf/longest_effective_sample_non_generation_time": 1.0,
    "perf/longest_sample_tokens_per_sec_without_non_generation": 10 / 18,
    "perf/longest_effective_sample_tokens_per_sec_without_non_generation": 10 / 19,
}  # fmt: skip
ASKED_FOR_BY_HAND = {
    # trajectories: group 0 passes 3 of 3, group 1 passes 0 of 2
    "passrate/pass@1": 0.5, "passrate/pass@2": 0.5,
    "multi_turn/raw_response_length/response_length_mean": 40 / 6,
    "multi_turn/raw_response_length/response_length_max": 10, "multi_turn/raw_response_length/response_length_min": 0,
    "multi_turn/raw_response_length/response_length_clip_ratio": 3 / 6,
    "multi_turn/wo_obs_response_length/response_length_mean": 33 / 6,
    "multi_turn/wo_obs_response_length/response_length_max": 10,
    "multi_turn/wo_obs_response_length/response_length_min": 0,
    "multi_turn/multi_turn_metric/round_number_mean": 3.5, "multi_turn/multi_turn_metric/round_number_max": 6,
    "multi_turn/multi_turn_metric/round_number_min": 1,
}  # fmt: skip


def test_every_name_and_value_of_one_rollout_by_hand():
    flags = args(
        reward_key="score", log_reward_category="kind", log_passrate=True, log_multi_turn=True,
        rollout_max_response_len=10,
    )  # fmt: skip
    assert rollout_metrics(flags, hand_made(), 20.0) == pytest.approx(BY_HAND)
    assert asked_for_metrics(flags, hand_made()) == pytest.approx(ASKED_FOR_BY_HAND)


def test_every_name_and_value_of_one_evaluation_by_hand():
    flags = args(reward_key="score", log_reward_category="kind", log_passrate=True)
    samples = hand_made()
    rewards = [s.reward["score"] for s in samples]
    truncated = [s.status == Sample.Status.TRUNCATED for s in samples]
    found = eval_metrics(
        flags, {"sums": {"rewards": rewards, "truncated": truncated, "samples": [samples[:3], samples[3:]]}}
    )
    shared = {
        f"eval/sums/{name.removeprefix('rollout/')}": value
        for name, value in BY_HAND.items()
        if name.startswith("rollout/")
    }
    of_the_set = {
        "eval/sums": 3 / 6,
        "eval/sums-truncated_ratio": 2 / 6,
        "eval/sums-pass@1": 0.5,
        "eval/sums-pass@2": 0.5,
    }
    assert found == pytest.approx(shared | of_the_set)
    with pytest.raises(ValueError, match=r"'sums' has 5 samples and 6 rewards; --log-passrate"):
        eval_metrics(flags, {"sums": {"rewards": rewards, "samples": samples[:5]}})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_group_statistics_do_not_depend_on_order_nesting_or_equal_counts(data):
    """Prompts with any number of trajectories, each of any number of samples; brute force over (prompt, trajectory)."""
    outcome = st.sampled_from([0.0, 1.0])
    prompts = data.draw(
        st.lists(st.lists(st.lists(outcome, min_size=1, max_size=3), min_size=1, max_size=5), min_size=1)
    )
    samples, trajectory_id = [], 0
    for group, trajectories in enumerate(prompts):
        for rewards in trajectories:
            shared = trajectory_id if len(rewards) > 1 else None
            samples += [Sample(group_index=group, rollout_id=shared, reward=r, response_length=1) for r in rewards]
            trajectory_id += 1
    samples = data.draw(st.permutations(samples))
    found = asked_for_metrics(args(log_passrate=True, log_multi_turn=False), samples)
    k = 1
    while k <= min(map(len, prompts)):
        shares = []
        for trajectories in prompts:
            subsets = list(itertools.combinations([max(rewards) for rewards in trajectories], k))
            shares.append(sum(max(subset) for subset in subsets) / len(subsets))
        assert found.pop(f"passrate/pass@{k}") == pytest.approx(sum(shares) / len(shares))
        k *= 2
    assert found == {}
    flat = [{r for e in trajectories for r in e} for trajectories in prompts if len(trajectories) > 1]
    expected = {f"rollout/zero_std/count_{r}": sum(kinds == {r} for kinds in flat) for r in (0.0, 1.0)}
    counts = {n: v for n, v in rollout_metrics(args(), samples, 1.0).items() if "zero_std" in n}
    assert counts == {name: count for name, count in expected.items() if count}


def test_headline_comes_from_the_rank_that_has_it():
    last_stage = {"steps": [{"loss": 3.0}, {"loss": 1.0, "grad_norm": 2.0}], "rollout": {"rollout/raw_reward": 0.5}}
    assert headline([None, {"steps": [], "rollout": {}}, last_stage]) == {
        "reward": 0.5,
        "loss": 1.0,
        "gradient norm": 2.0,
    }
    assert headline([None]) == {}


def forked(rewards, *, key="x"):
    """Samples of one data set: per prompt its trajectories, per trajectory the rewards of its samples."""
    samples = [
        Sample(group_index=group, rollout_id=(group, number), reward=reward, response_length=2)
        for group, trajectories in enumerate(rewards)
        for number, of_one in enumerate(trajectories)
        for reward in of_one
    ]
    return {key: {"rewards": [s.reward for s in samples], "truncated": [False] * len(samples), "samples": samples}}


def test_an_evaluation_counts_trajectories():
    data = forked([[[1.0, 1.0, 1.0]], [[0.0]]])
    assert eval_metrics(args(), data)["eval/x"] == 0.5
    assert eval_summary(data) == ["x: mean reward 0.5, 4 samples of 2 trajectories, 0.0% of them truncated"]
    # samples of a trajectory with rewards of their own: it has their mean
    assert eval_metrics(args(), forked([[[1.0, 0.0], [1.0]], [[0.0]]]))["eval/x"] == pytest.approx((0.5 + 1 + 0) / 3)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_evaluation_does_not_depend_on_how_often_trajectories_fork(data):
    reward = st.sampled_from([0.0, 0.25, 1.0])
    prompts = data.draw(st.lists(st.lists(reward, min_size=1, max_size=4), min_size=1, max_size=5))
    times = st.integers(1, 4)
    once = [[[r] for r in trajectories] for trajectories in prompts]
    often = [[[r] * data.draw(times) for r in trajectories] for trajectories in prompts]
    flat = [r for trajectories in prompts for r in trajectories]
    for form in (once, often):
        found = eval_metrics(args(log_passrate=True), forked(form))
        assert found["eval/x"] == pytest.approx(sum(flat) / len(flat))
        assert found["eval/x-pass@1"] == pytest.approx(
            sum(sum(r == 1 for r in trajectories) / len(trajectories) for trajectories in prompts) / len(prompts)
        )


def test_an_evaluation_has_the_names_of_a_rollout():
    data = forked([[[1], [1]], [[0], [1]]])
    for s in data["x"]["samples"]:
        s.rollout_top_p_token_offsets = [0, 3, 5]
    found = eval_metrics(args(), data)
    assert (found["eval/x/zero_std/count_1"], found["eval/x/zero_std/count_1.0"]) == (1.0, 1.0)
    assert found["eval/x/top_p_kept_vocab_per_token"] == 2.5
    assert (found["eval/x/prefix_cache_hit_rate"], found["eval/x/avg_cached_tokens_per_sample"]) == (0.0, 0.0)


def test_what_did_not_happen_is_zero_and_not_absent():
    flags = args(sglang_speculative_algorithm="EAGLE")
    found = rollout_metrics(flags, [sample(0, 1.0, 1)], seconds=1.0)
    names = ("spec_accept_rate", "spec_accept_length", "prefix_cache_hit_rate", "avg_cached_tokens_per_sample")
    assert {name: found[f"rollout/{name}"] for name in names} == dict.fromkeys(names, 0.0)
    assert "rollout/spec_accept_rate" not in rollout_metrics(args(), [sample(0, 1.0, 1)], seconds=1.0)


def test_a_failed_reward_makes_no_spread():
    """Its 0 stands for nothing: the others of its group, all 1, teach nothing."""
    samples = [sample(0, 1.0, 1), sample(0, 1.0, 1), sample(0, 0.0, 1)]
    samples[2].remove_sample, samples[2].metadata = True, {"reward_error": "TimeoutError: no answer"}
    assert rollout_metrics(args(), samples, seconds=1.0)["rollout/zero_std/count_1.0"] == 1.0


def test_speculative_decoding():
    samples = [sample(0, 1.0, 1), sample(0, 1.0, 1)]
    for s, (accepted, drafted, verified, completion) in zip(samples, [(6, 8, 2, 8), (1, 2, 3, 7)], strict=True):
        s.spec_info.spec_accept_token_num, s.spec_info.spec_draft_token_num = accepted, drafted
        s.spec_info.spec_verify_ct, s.spec_info.completion_token_num = verified, completion
    found = rollout_metrics(args(), samples, seconds=1.0)
    assert found["rollout/spec_accept_rate"] == 7 / 10
    assert found["rollout/spec_accept_length"] == 15 / 5


def test_groups_without_spread_are_counted_by_their_reward():
    rewards = [[1.0, 1.0], [0.0, 0.0, 0.0], [0.04, 0.04], [1.0, 0.0], [1, 1]]
    samples = [sample(group, reward, 1) for group, members in enumerate(rewards) for reward in members]
    found = rollout_metrics(args(), samples, seconds=1.0)
    counts = {name.partition("zero_std/")[2]: value for name, value in found.items() if "zero_std" in name}
    # 0.04 is shown as 0.0; the name without a fraction is that of integers in slime <= 0.3.1
    assert counts == {"count_0.0": 2.0, "count_1.0": 2.0, "count_1": 1.0}
    assert not [n for n in rollout_metrics(args(advantage_estimator="ppo"), samples, 1.0) if "zero_std" in n]


def test_rewards_that_are_no_numbers_yet_do_not_stop_a_rollout():
    """A custom reward post-processing or converter may start from dicts, or from nothing."""
    whole = {"format": 1.0, "answer": 0.0}
    samples = [sample(0, whole, 1), sample(0, dict(whole), 1), sample(1, None, 1), sample(1, None, 1)]
    found = rollout_metrics(args(), samples, seconds=1.0)
    assert not [name for name in found if "zero_std" in name]
    assert found["rollout/response_len/mean"] == 1.0


def test_without_engines_there_is_no_speed_per_gpu():
    found = rollout_metrics(args(rollout_num_gpus=None), [sample(0, 1.0, 4)], seconds=2.0)
    assert "perf/tokens_per_gpu_per_sec" not in found
    assert found["perf/longest_sample_tokens_per_sec"] == 2.0


def test_evaluation_without_samples_has_rewards_only():
    data = {"a": {"rewards": [1.0, 0.0, 0.5], "truncated": [True, False, False]}, "b": {"rewards": [2]}}
    assert eval_metrics(args(log_passrate=True), data) == {
        "eval/a": 0.5,
        "eval/a-truncated_ratio": pytest.approx(1 / 3),
        "eval/b": 2.0,
    }


def test_pass_rates_stop_at_the_smallest_group():
    found = pass_rates([[1, 0, 0], [0, 0, 0, 0, 1]])
    assert set(found) == {"pass@1", "pass@2"}
    assert found["pass@1"] == pytest.approx((1 / 3 + 1 / 5) / 2)
    assert found["pass@2"] == pytest.approx((2 / 3 + 2 / 5) / 2)


def test_rewards_of_an_evaluation_that_are_objects_are_named():
    data = {"sums": {"rewards": [1.0, {"score": 1}], "truncated": [False, False]}}
    with pytest.raises(ValueError, match=r"'sums'.*\{'score': 1\}.*--eval-reward-key"):
        eval_metrics(args(), data)


def test_a_line_about_each_evaluation_data_set() -> None:
    data = {
        "sums": {"rewards": [1, 0.0, 1.0, 1], "truncated": [False, True, False, False]},
        "essays": {"rewards": [0.25, 0.5]},
        "odd": {"rewards": [{"a": 1}]},
    }
    assert eval_summary(data) == [
        "sums: mean reward 0.75, 4 samples, 25.0% of them truncated",
        "essays: mean reward 0.375, 2 samples",
        "odd: no rewards that are numbers",
    ]
