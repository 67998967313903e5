"""Samples that the default rollout trains on, of the groups that are returned to it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import group_stream
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.durable.state_codec import decode_group, encode_group
from slime.rollout.group_stream import RolloutStream
from slime.rollout.sglang_rollout import generate_and_rm_group, generate_rollout
from slime.rollout.staleness import UNKNOWN_WEIGHTS, WeightClock
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

DONE, CUT = Sample.Status.COMPLETED, Sample.Status.ABORTED


def made(index: int, step: int, status: Sample.Status, length: int = 3) -> Sample:
    """A sample with tokens of weights of ``step``."""
    sample = Sample(index=index, group_index=index // 2, prompt="p", tokens=[5, 6], status=Sample.Status.PENDING)
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "9"}
    sample.append_response_tokens(tokens=[7] * length, log_probs=[-1.0] * length, text="x" * length, meta_info=meta)
    sample.weight_version_spans = [{"version": "9", "start": 0, "end": length, "step": step}]
    sample.status, sample.reward = status, 1.0 if status == DONE else None
    return sample


def fresh(rollout_id: int, clock: WeightClock, **changes: Any) -> RolloutStream:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_stream, "weight_clock", lambda: clock)
        never: Any = None
        state: Any = SimpleNamespace(semaphore=None)
        return RolloutStream(rollout_args(**changes), rollout_id, state, never, never, None)


def reset_stale(stream: RolloutStream, groups: list[Any]) -> None:
    for group in groups:
        stream.reset_stale(group)


@pytest.fixture
def clock() -> WeightClock:
    clock = WeightClock()
    clock.publish(1, 5)
    return clock


def lengths(groups: Any) -> list[int]:
    return [sample.response_length for sample in iter_samples(groups)]


def test_samples_that_are_too_old_begin_again(clock):
    old = made(0, 3, DONE)
    old.metadata = {"start_rollout_id": 2, "reward_error": "?", "rm_type": "math"}
    groups = [[old, made(1, 4, CUT)], [made(2, 4, DONE), made(3, 4, DONE)], [made(4, 2, CUT), Sample()]]
    draw = fresh(5, clock, max_staleness=1)
    reset_stale(draw, groups)
    assert lengths(groups) == [0, 3, 3, 3, 0, 0]
    again = groups[0][0]
    assert (again.tokens, again.response, again.status, again.reward) == ([5, 6], "", Sample.Status.PENDING, None)
    assert (again.index, again.group_index, again.prompt, again.weight_version_spans) == (0, 0, "p", [])
    assert again.metadata == {"rm_type": "math"}
    assert draw.metrics() == {
        "rollout/staleness/regenerated_groups": 2, "rollout/staleness/regenerated_tokens": 6,
    }  # fmt: skip


def test_without_a_bound_all_is_kept(clock):
    groups = [[made(0, -1, DONE), made(1, 0, CUT)]]
    draw = fresh(100, clock)
    reset_stale(draw, groups)
    assert lengths(groups) == [3, 3]
    assert draw.metrics() == {}


def test_a_fan_out_begins_again_from_its_prompt(clock):
    one = [made(0, 1, DONE), made(0, 1, DONE)]
    for sample in one:
        sample.rollout_id = 17
    groups = [[one, made(1, 5, DONE)]]
    draw = fresh(5, clock, max_staleness=2)
    reset_stale(draw, groups)
    again = groups[0][0]
    assert isinstance(again, Sample)
    assert (again.index, again.rollout_id, again.response_length, again.tokens) == (0, None, 0, [])
    assert draw.metrics()["rollout/staleness/regenerated_tokens"] == 6


def test_groups_that_a_mask_would_leave_out_as_a_whole_begin_again(clock):
    groups = [[made(0, 4, DONE), made(1, 4, DONE)], [made(2, 0, DONE), made(3, 0, CUT)]]
    draw = fresh(5, clock, partial_rollout=True, mask_offpolicy_in_partial_rollout=True, max_staleness=0)
    reset_stale(draw, groups)
    assert lengths(groups) == [0, 0, 3, 3]  # what is masked may be of any age
    assert draw.metrics() == {
        "rollout/staleness/regenerated_groups": 1, "rollout/staleness/regenerated_tokens": 6,
        "rollout/staleness/masked_tokens": 6,
    }  # fmt: skip


def test_tokens_get_the_step_of_the_weights_at_the_start(clock):
    draw = fresh(5, clock)
    for name, step in (("1", 5), ("2", 5), ("default", UNKNOWN_WEIGHTS)):
        sample = Sample()
        spans = [{"version": name, "start": 0, "end": 2}]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": name, "weight_versions": spans}
        sample.append_response_tokens(tokens=[7, 7], log_probs=[-1.0, -1.0], meta_info=meta)
        draw._stamp([sample], None)
        assert sample.weight_version_spans == [{**spans[0], "step": step}]
    by_hand = Sample(response_length=2)
    draw._stamp([[by_hand]], None)
    assert by_hand.weight_version_spans == [{"version": None, "start": 0, "end": 2, "step": 5}]


def test_what_is_still_written_to_an_old_response_does_not_reach_the_new_one(clock):
    old = [made(0, 0, DONE), made(1, 0, DONE)]
    fan_out = [made(2, 0, DONE), made(2, 0, DONE)]
    groups = [[*old], [fan_out, made(3, 0, DONE)]]
    reset_stale(fresh(5, clock, max_staleness=1), groups)
    for sample in (*old, *fan_out):  # the reward that its rollout left behind
        sample.reward, sample.remove_sample, sample.metadata["reward_error"] = 1.0, True, "?"
    for sample in iter_samples(groups):
        assert (sample.reward, sample.remove_sample, sample.metadata) == (None, False, {})


LABELS: list[Any] = []


async def made_anew(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Two samples that know nothing of the one that they are made of, and what that one says."""
    LABELS.append((sample.index, sample.group_index, sample.prompt, sample.label, sample.metadata, sample.tokens))
    return [
        Sample(rollout_id=sample.index, tokens=[1, 2], response="x", response_length=1, rollout_log_probs=[-0.1],
               reward=1.0, status=DONE, metadata={"turn": turn})
        for turn in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("saved", [False, True])
def test_a_fan_out_made_again_begins_from_its_whole_prompt(cluster, make_args, saved):
    LABELS.clear()
    args = make_args(
        custom_generate_function_path=f"{__name__}.made_anew", partial_rollout=True, n_samples_per_prompt=1,
        mask_offpolicy_in_partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=2,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].metadata = {"rm_type": "math"}
    output = run(generate_and_rm_group(args, group, {}))
    assert [sample.metadata["turn"] for sample in iter_samples(output)] == [0, 1]
    source.add_samples([decode_group(json.loads(json.dumps(encode_group(output)))) if saved else output])
    metrics = generate_rollout(args, 1, source).metrics
    assert metrics["rollout/staleness/regenerated_groups"] == 1
    first, again = (found for found in LABELS if found[0] == 0)
    assert again[:4] == first[:4] == (0, 0, "p0", "l0")
    assert again[4] == {"rm_type": "math", "turn": 0}
    assert again[5] == []


def test_a_fan_out_that_is_returned_finished_is_trained_on_as_it_is(cluster, make_args):
    LABELS.clear()
    args = make_args(
        custom_generate_function_path=f"{__name__}.made_anew", n_samples_per_prompt=1, rollout_batch_size=1,
        over_sampling_batch_size=1,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    output = run(generate_and_rm_group(args, source.get_samples(1)[0], {}))
    source.add_samples([output])
    assert generate_rollout(args, 1, source).samples == [output]
    assert len(LABELS) == 1
