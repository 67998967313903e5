"""Return types, filters, load replies, metrics of engine calls."""

from __future__ import annotations

import pytest
import torch

from slime.ray.manager.rollout_metrics import request_metrics, top_p_metrics
from slime.rollout.base_types import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    check_sibling_rollout_ids,
)
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tools.check_docs import undocumented

ARGS = run_args()


def test_what_older_rollout_functions_return_is_wrapped():
    def legacy(args, rollout_id, data_source, evaluation=False):
        return {"ds": {"rewards": [1]}} if evaluation else [[Sample()]]

    assert call_rollout_fn(legacy, None, 0, None, evaluation=True) == RolloutFnEvalOutput({"ds": {"rewards": [1]}})
    assert call_rollout_fn(legacy, None, 0, None, evaluation=False) == RolloutFnTrainOutput([[Sample()]])
    ready = RolloutFnTrainOutput([], {"m": 1})
    assert call_rollout_fn(lambda *a, evaluation: ready, evaluation=False) is ready
    with pytest.raises(TypeError, match="returned NoneType with evaluation=False"):
        call_rollout_fn(lambda *a, evaluation: None, evaluation=False)


def s(rollout_id=None):
    return Sample(rollout_id=rollout_id)


@pytest.mark.parametrize("nested", [[[s(), s()]], [[[s(1), s(1)], [s(2)]]], [[[s()]]], [], [[[s(3), s(3)], s()]]])
def test_siblings_with_one_id_are_accepted(nested):
    check_sibling_rollout_ids(nested)


@pytest.mark.parametrize("nested", [[[[s(), s()]]], [[[s(1), s(2)]]], [[[s(1), s()]]]])
def test_siblings_with_several_ids_are_refused(nested):
    with pytest.raises(AssertionError, match="must share one rollout_id"):
        check_sibling_rollout_ids(nested)


def test_filter_verdicts():
    assert call_dynamic_filter(None).keep
    assert not call_dynamic_filter(lambda *a: 0).keep
    output = DynamicFilterOutput(False, "r")
    assert call_dynamic_filter(lambda *a: output) is output


@pytest.mark.parametrize(
    ("keep", "if_insufficient", "remaining", "dropped"),
    [
        (True, False, 0, False),
        (False, False, 0, True),
        (False, True, 4, False),
        (False, True, 3, False),
        (False, True, 5, True),
    ],
)
def test_when_a_group_is_dropped(keep, if_insufficient, remaining, dropped):
    output = DynamicFilterOutput(keep, "r", if_insufficient)
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4) is dropped


def test_drops_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("a", "b", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2, "rollout/dynamic_filter/drop_b": 1}


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([0, 1], True, None), ([1, 1], False, "zero_std_1"), ([0.25, 0.25, 0.25], False, "zero_std_0.2"),
     ([1.0, 1.0 + 1e-7], False, "zero_std_1.0"), ([1.0, 1.0 + 1e-5], True, None), ([3.0], False, "zero_std_3.0")],
)  # fmt: skip
def test_groups_of_equal_rewards_are_dropped(rewards, keep, reason):
    group = [Sample(reward=r) for r in rewards]
    output = check_reward_nonzero_std(ARGS, group)
    assert output.keep is keep
    assert (
        output.reason is None
        if reason is None
        else float(output.reason.removeprefix("zero_std_")) == float(reason.removeprefix("zero_std_"))
    )
    assert not output.keep_when_insufficient
    assert check_reward_nonzero_std_with_fallback(ARGS, [[x] for x in group]).keep_when_insufficient


def test_metrics_of_engine_calls():
    first, second = Sample(), Sample()
    first.trace = {
        "events": [
            {"type": "span_start", "name": "sglang_generate", "attrs": {"e2e_latency": 100}},
            {"type": "span_end", "name": "sglang_generate", "attrs": {"e2e_latency": 1.0, "queue_time": 0.5}},
            {"type": "span_end", "name": "reward_model", "attrs": {"e2e_latency": 100}},
        ]
    }
    second.trace = {"events": [{"type": "span_end", "name": "sglang_generate", "attrs": {"e2e_latency": 4.0}}]}
    found = request_metrics([first, second, Sample()])
    assert found["perf/request/e2e_latency/mean"] == 2.5
    assert found["perf/request/e2e_latency/max"] == 4.0
    assert found["perf/request/queue_time/median"] == 0.5
    assert request_metrics([Sample()]) == {}


def test_times_of_prefill_and_decode():
    def phase(name, start, end, number):
        return [
            {"type": "span_start", "name": name, "ts": start, "span_id": number},
            {"type": "span_end", "name": name, "ts": end, "span_id": number},
        ]

    one, other = Sample(), Sample()
    one.trace = {
        "events": [
            *phase("sglang_prefill", 10.0, 10.5, "a"),
            *phase("sglang_decode", 10.5, 14.5, "b"),
            *phase("reward_model", 0.0, 99.0, "c"),
            {"type": "span_end", "name": "sglang_decode", "ts": 99.0, "span_id": "never begun"},
        ]
    }
    other.trace = {"events": [*phase("sglang_pd_prefill", 20.0, 21.0, "d"), *phase("sglang_pd_decode", 1.0, 3.0, "e")]}
    found = request_metrics([one, other])
    assert {name.split("/")[1] for name in found} == {"prefill", "decode"}
    for name, value in (("mean", 0.75), ("median", 0.75), ("max", 1.0), ("min", 0.5)):
        assert found[f"perf/prefill/time/{name}"] == value
    for name, value in (("mean", 3.0), ("median", 3.0), ("max", 4.0), ("min", 2.0)):
        assert found[f"perf/decode/time/{name}"] == value
    assert undocumented(found) == []


def test_groups_of_any_nesting_are_judged_by_all_their_samples():
    def nested(rewards):
        return [nested(r) for r in rewards] if isinstance(rewards, list) else Sample(reward=rewards)

    assert check_reward_nonzero_std(ARGS, nested([0, [0, [1]]])).keep
    assert not check_reward_nonzero_std(ARGS, nested([1, [1, 1, 1], []])).keep
    assert check_reward_nonzero_std(ARGS, [[], []]).reason == "empty"
    with pytest.raises(ValueError, match=r"sample index=7 group_index=3: reward None is not a number"):
        check_reward_nonzero_std(ARGS, [[Sample(index=7, group_index=3)]])


def test_mean_top_p_mask_size():
    one = Sample(response_length=3, loss_mask=[1, 0, 1], rollout_top_p_token_offsets=[0, 2, 2, 6])
    assert top_p_metrics([one, Sample(response_length=5)]) == {"rollout/top_p_kept_vocab_per_token": 3.0}
    assert top_p_metrics([Sample()]) == {}


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_top_p_masks_of_tokens_that_are_not_trained_do_not_count(make):
    # sizes 2, 4, 1 and 3; a partial rollout took the first two out of the loss
    offsets = {"rollout_top_p_token_ids": make(list(range(10))), "rollout_top_p_token_offsets": make([0, 2, 6, 7, 10])}
    partly = Sample(response_length=4, loss_mask=make([0, 0, 1, 1]), **offsets)
    wholly = Sample(response_length=4, **offsets)
    nothing = Sample(response_length=4, loss_mask=[0, 0, 0, 0], **offsets)
    removed = Sample(response_length=4, remove_sample=True, **offsets)
    name = "rollout/top_p_kept_vocab_per_token"
    assert top_p_metrics([partly]) == {name: (1 + 3) / 2}
    assert top_p_metrics([partly, wholly, nothing, removed]) == {name: (1 + 3 + 2 + 4 + 1 + 3) / 6}
    assert top_p_metrics([nothing, removed]) == {}
