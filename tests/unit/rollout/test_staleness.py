"""Lags of tokens: the clock, spans of engine replies, masks, and the metrics, against lags counted token by token."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from slime.ray.manager import rollout_metrics
from slime.ray.manager.rollout_metrics import staleness_metrics
from slime.rollout import staleness
from slime.rollout.staleness import (
    UNKNOWN_WEIGHTS,
    StalenessBound,
    WeightClock,
    mask_older_versions,
    oldest_step,
    stamp_steps,
    with_all_steps,
)
from slime.utils.types import Sample


def reply(sample: Sample, *lengths: tuple[str, int]) -> None:
    """Append an engine reply that was made by these versions, in the engine's form."""
    spans, start = [], 0
    for version, length in lengths:
        spans.append({"version": version, "start": start, "end": start + length})
        start += length
    meta = {"finish_reason": {"type": "stop"}, "weight_version": lengths[-1][0], "weight_versions": spans}
    sample.append_response_tokens(tokens=[7] * start, log_probs=[-1.0] * start, meta_info=meta)


def version_of_each_token(sample: Sample) -> list[Any]:
    found: list[Any] = [None] * sample.response_length
    for span in sample.weight_version_spans:
        found[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return found


def test_spans_are_positions_in_the_response():
    sample = Sample(tokens=[1, 2])
    reply(sample, ("3", 2), ("4", 1))
    sample.append_response_tokens(tokens=[9, 9], trainable=False)
    reply(sample, ("4", 1), ("5", 2))
    assert version_of_each_token(sample) == ["3", "3", "4", None, None, "4", "5", "5"]
    assert sample.weight_versions == ["4", "5"]
    reply(sample, ("5", 2))
    assert sample.weight_version_spans[-1] == {"version": "5", "start": 6, "end": 10}
    assert Sample.from_dict(sample.to_dict()).weight_version_spans == sample.weight_version_spans


def reply_naming_its_end(sample: Sample, version: str, length: int) -> None:
    """Append a reply of an engine that only says which version it had in the end."""
    meta = {"finish_reason": {"type": "abort"}, "weight_version": version}
    sample.append_response_tokens(tokens=[7] * length, log_probs=[-1.0] * length, meta_info=meta)


def test_replies_without_spans_name_the_version_at_their_end():
    sample = Sample(tokens=[1])
    reply_naming_its_end(sample, "default", 2)
    assert sample.weight_version_spans == [{"version": "default", "start": 0, "end": 2, "at_end": True}]
    reply_naming_its_end(sample, "default", 0)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], meta_info={"finish_reason": {"type": "stop"}})
    assert sample.weight_version_spans == [{"version": "default", "start": 0, "end": 2, "at_end": True}]
    reply(sample, ("default", 1))
    assert version_of_each_token(sample) == ["default", "default", None, "default"]


def test_tokens_of_a_request_that_may_have_crossed_an_update_are_as_old_as_they_can_be():
    clock = WeightClock()
    for version, step in ((1, 0), (2, 1)):
        clock.publish(version, step)
    crossed, whole, unpublished = Sample(), Sample(), Sample()
    for sample, version in ((crossed, "2"), (whole, "2"), (unpublished, "3")):
        reply_naming_its_end(sample, version, 3)
    stamp_steps([crossed, unpublished], clock, since=0)
    stamp_steps([whole], clock, since=1)
    assert [oldest_step(sample, clock, None) for sample in (crossed, whole, unpublished)] == [0, 1, 0]
    assert mask_older_versions([[crossed], whole, unpublished]) == 6  # where it is not sure, nothing is trained on
    assert (crossed.loss_mask, whole.loss_mask, unpublished.loss_mask) == ([0] * 3, [1] * 3, [0] * 3)


def test_trained_tokens_without_a_version_are_those_of_the_start():
    clock = WeightClock()
    clock.publish(1, 0)
    clock.publish(2, 4)
    sample = Sample(response_length=6, loss_mask=[1, 1, 0, 0, 0, 1])
    sample.weight_version_spans = [{"version": "2", "start": 3, "end": 5}]
    stamp_steps(sample, clock)
    assert len(sample.weight_version_spans) == 1
    stamp_steps(sample, clock, since=3)
    assert sample.weight_version_spans == [
        {"version": None, "start": 0, "end": 3, "step": 3},
        {"version": "2", "start": 3, "end": 5, "step": 4},
        {"version": None, "start": 5, "end": 6, "step": 3},
    ]
    sample.append_response_tokens(tokens=[8], trainable=False)
    stamp_steps(sample, clock, since=4)
    assert len(sample.weight_version_spans) == 3  # no loss on the last one


def test_a_span_that_ends_beyond_the_tokens_is_cut_and_one_that_ends_before_them_is_stretched():
    for reported in ([("1", 0, 2), ("2", 2, 9)], [("1", 0, 2), ("2", 2, 3)], [("1", 0, 2), ("2", 2, 4), ("3", 4, 6)]):
        sample = Sample()
        spans = [{"version": v, "start": a, "end": b} for v, a, b in reported]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "2", "weight_versions": spans}
        sample.append_response_tokens(tokens=[7] * 4, log_probs=[-1.0] * 4, meta_info=meta)
        assert version_of_each_token(sample) == ["1", "1", "2", "2"]


def test_the_clock_knows_versions_and_takes_higher_ones_for_at_least_as_new():
    clock = WeightClock()
    reported = []
    forget = clock.listen(lambda: reported.append(clock.step))
    assert (clock.step, clock.step_of("1"), clock.least_step_of("1")) == (None, None, None)
    clock.publish(1, 5)
    clock.publish(2, 7)
    assert (clock.step, clock.step_of("1"), clock.step_of(2)) == (7, 5, 7)
    assert (clock.step_of("3"), clock.least_step_of("3"), clock.least_step_of("1")) == (None, 7, 5)
    forget()
    clock.publish(3, 8)
    assert reported == [5, 7]


def test_weights_that_were_never_pushed_are_older_than_all():
    clock = WeightClock()
    assert clock.least_step_of("default") is None  # in runs that push none
    clock.publish(4, 0)
    assert {clock.least_step_of(version) for version in ("default", "3", None)} == {UNKNOWN_WEIGHTS}
    assert UNKNOWN_WEIGHTS < 0


def test_the_bound_counts_the_groups_in_front():
    bound = StalenessBound(1, batch_size=4)
    # Rollout 6 is next and the engines hold step 5: four groups go into it, at a lag of 1, and no more.
    assert [bound.may_start(ahead, 6, 5) for ahead in range(6)] == [True] * 4 + [False] * 2
    assert [bound.may_start(ahead, 6, 6) for ahead in (0, 7, 8)] == [True, True, False]
    assert not bound.may_start(0, 7, 5)
    assert bound.may_start(10**6, 6, None)
    assert StalenessBound(None, 4).may_start(10**6, 6, 0)
    assert [bound.is_too_old(step, 6) for step in (4, 5, None)] == [True, False, False]
    assert [bound.is_last_chance(step, 6) for step in (5, 6)] == [True, False]


def test_the_oldest_trained_token_counts():
    clock = WeightClock()
    for version, step in (("1", 0), ("2", 1), ("3", 2)):
        clock.publish(version, step)
    sample = Sample()
    reply(sample, ("1", 2), ("3", 2))
    assert oldest_step([[sample]], clock, None) == 0
    sample.loss_mask = [0, 0, 1, 1]
    assert oldest_step([sample], clock, None) == 2
    sample.loss_mask = [0, 0, 0, 0]
    assert oldest_step([sample], clock, None) is None
    by_hand = Sample(response_length=2)  # of a custom function that says no version
    assert oldest_step([by_hand], clock, None) is None
    assert oldest_step([by_hand], clock, 1) == 1
    other = Sample()
    reply(other, ("3", 1))
    assert oldest_step([other, by_hand], clock, 1) == 1


def test_steps_survive_a_restart():
    clock = WeightClock()
    clock.publish(4, 3)
    sample = Sample()
    reply(sample, ("4", 2), ("5", 1))
    stamp_steps([sample], clock)
    assert [span.get("step") for span in sample.weight_version_spans] == [3, None]
    # Versions are counted from 1 again: what is kept has a step for every token, if need be the least there can be.
    kept = with_all_steps([sample], clock)
    assert [span["step"] for span in kept[0].weight_version_spans] == [3, 3]
    assert "step" not in sample.weight_version_spans[1]
    assert with_all_steps(kept, clock) is kept
    later = WeightClock()
    for version, step in ((1, 10), (4, 13), (5, 14)):
        later.publish(version, step)
    assert oldest_step(kept, later, None) == 3
    reply(kept[0], ("5", 2))  # the same number, other weights
    stamp_steps(kept, later)
    assert [span["step"] for span in kept[0].weight_version_spans] == [3, 3, 14]
    assert mask_older_versions(kept) == 3


def test_tokens_older_than_the_newest_are_masked():
    sample = Sample()
    reply(sample, ("1", 2), ("2", 1))
    sample.append_response_tokens(tokens=[9], trainable=False)
    reply(sample, ("3", 2))
    one = Sample()
    reply(one, ("1", 3))
    assert mask_older_versions([[sample], one]) == 3
    assert sample.loss_mask == [0, 0, 0, 0, 1, 1]
    assert one.loss_mask == [1, 1, 1]
    assert mask_older_versions([sample]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_metrics_are_those_of_a_list_of_lags(monkeypatch, seed):
    rng = random.Random(seed)
    clock = WeightClock()
    for version in range(1, 31):
        clock.publish(version, version - 1)
    monkeypatch.setattr(rollout_metrics, "weight_clock", lambda: clock)
    lags, samples = [], []
    for _ in range(rng.randint(1, 20)):
        sample = Sample()
        for _ in range(rng.randint(1, 3)):
            parts = sorted({rng.randint(max(1, 31 - rng.choice([2, 30])), 30) for _ in range(3)})
            counts = [rng.randint(1, 50) for _ in parts]
            reply(sample, *((str(v), n) for v, n in zip(parts, counts, strict=True)))
            lags += [30 - (v - 1) for v, n in zip(parts, counts, strict=True) for _ in range(n)]
        samples.append(sample)
    found = staleness_metrics(samples, 30)
    assert found["rollout/staleness/mean"] == pytest.approx(sum(lags) / len(lags))
    assert found["rollout/staleness/max"] == max(lags)
    assert found["rollout/staleness/p99"] == sorted(lags)[math.ceil(0.99 * len(lags)) - 1]
    shares = Counter(min(lag, rollout_metrics.MAX_LAG_SHOWN) for lag in lags)
    for lag in range(rollout_metrics.MAX_LAG_SHOWN + 1):
        assert found.get(f"rollout/staleness/lag_{lag}", 0.0) == pytest.approx(shares[lag] / len(lags))


def test_no_metrics_where_no_version_is_known(monkeypatch):
    monkeypatch.setattr(rollout_metrics, "weight_clock", WeightClock)
    sample = Sample()
    reply(sample, ("1", 2))
    assert staleness_metrics([sample], 3) == {}
    assert staleness.weight_clock() is staleness.weight_clock()
