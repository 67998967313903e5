"""Groups that the default rollout hands back unfinished, whatever kept it from finishing them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
from typing import Any

import pytest

from slime.rollout import cancelling, group_stream, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.groups import GroupJob, note_result
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.types import Sample

HERE = __name__
Status = Sample.Status
CALLS: list[tuple[int | None, str]] = []
MAY_END = threading.Event()


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(group_stream, "FINISH_GRACE_S", 0.05)
    monkeypatch.setattr(cancelling, "CANCEL_GRACE_S", 0.05)
    CALLS.clear()
    MAY_END.clear()
    yield
    MAY_END.set()


def answered(sample: Sample, text: str = "r", status: Status = Status.COMPLETED) -> Sample:
    sample.tokens = [112, 48]
    sample.append_response_tokens(tokens=[7] * len(text), log_probs=[-0.1] * len(text), text=text)
    sample.status = status
    return sample


def pair(sample: Sample, second: Status = Status.COMPLETED) -> list[Sample]:
    """Return a sample's fan-out: the sample itself, and another."""
    other, sample.rollout_id = copy.deepcopy(sample), sample.index
    other.rollout_id = sample.index
    return [answered(sample, "one"), answered(other, "two", second)]


def calls(index: int) -> list[str]:
    return [response for asked, response in CALLS if asked == index]


async def good(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 1.0


def indices(groups: Any) -> list[int | None]:
    return [sample.index for sample in iter_samples(groups)]


# Generate functions that give up


async def torn_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    CALLS.append((sample.index, sample.response))
    first = sample.index == 0 and len(calls(0)) == 1
    return pair(sample, Status.ABORTED if first else Status.COMPLETED)


async def torn_once_resumable(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return await torn_once(args, sample, sampling_params)


torn_once_resumable.resumable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("function", ["torn_once", "torn_once_resumable"])
def test_a_fan_out_that_was_aborted_in_part_is_generated_again(cluster, make_args, partial, function):
    args = make_args(
        custom_generate_function_path=f"{HERE}.{function}", custom_rm_path=f"{HERE}.all_good", partial_rollout=partial,
        rollout_batch_size=1, over_sampling_batch_size=1,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    assert set(indices(generate_rollout(args, 0, source).samples)) == {2, 3}
    assert isinstance(source.buffer[0][0], Sample)
    output = generate_rollout(args, 1, source)
    assert [[s.response for s in trajectory] for trajectory in output.samples[0]] == [["one", "two"]] * 2
    assert set(indices(output.samples)) == {0, 1}
    assert calls(0) == ["", ""]
    assert source.buffer == []


async def all_good(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [1.0] * len(samples)


async def gives_up_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    CALLS.append((sample.index, sample.response))
    if sample.index == 2 and len(calls(2)) == 1:
        sample.metadata["tried"] = True
        sample.status = Status.ABORTED
        return sample
    return answered(sample)


def test_a_group_the_generate_function_gave_up_on_goes_back_to_the_source(cluster, make_args):
    args = make_args(custom_generate_function_path=f"{HERE}.gives_up_once", custom_rm_path=f"{HERE}.good")
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 4
    assert 2 not in indices(output.samples)
    assert {2, 3} <= set(indices(source.buffer))
    given_up, *others = source.buffer
    assert [sample.metadata for sample in given_up] == [{"failed_attempts": 1}] * 2  # otherwise as it was drawn
    assert not any(sample.metadata for sample in iter_samples(others))
    assert {2, 3} <= set(indices(generate_rollout(args, 1, source).samples))


async def half_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    CALLS.append((sample.index, sample.response))
    first = sample.index == 0 and len(calls(0)) == 1
    return answered(sample, "half" if first else "whole", Status.ABORTED if first else Status.COMPLETED)


half_once.resumable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("partial", "second"), [(False, ""), (True, "half")])
def test_half_a_response_is_continued_in_a_partial_rollout_only(cluster, make_args, partial, second):
    args = make_args(
        custom_generate_function_path=f"{HERE}.half_once", custom_rm_path=f"{HERE}.good", partial_rollout=partial,
        rollout_batch_size=1, over_sampling_batch_size=1,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    generate_rollout(args, 1, source)
    assert calls(0) == ["", second]


# Groups in flight at the end of a rollout


async def fan_out_beside_a_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The second sample of the second group is in a long tool call, the first time."""
    CALLS.append((sample.index, sample.response))
    if sample.index == 3 and len(calls(3)) == 1:
        await asyncio.Event().wait()
    return pair(sample)


def test_finished_fan_outs_keep_their_siblings_when_another_sample_is_cancelled(cluster, make_args):
    args = make_args(
        custom_generate_function_path=f"{HERE}.fan_out_beside_a_tool", custom_rm_path=f"{HERE}.all_good",
        partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=2,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    assert set(indices(generate_rollout(args, 0, source).samples)) == {0, 1}
    fan_out, waiting = source.buffer[0]
    assert [(s.index, s.response, s.status, s.reward) for s in fan_out] == [
        (2, "one", Status.COMPLETED, 1.0), (2, "two", Status.COMPLETED, 1.0),
    ]  # fmt: skip
    assert (waiting.index, waiting.response, waiting.status) == (3, "", Status.PENDING)
    args.rollout_batch_size = args.over_sampling_batch_size = 1
    output = generate_rollout(args, 1, source)
    assert [[s.response for s in trajectory] for trajectory in output.samples[0]] == [["one", "two"]] * 2
    assert (calls(2), calls(3)) == ([""], ["", ""])


async def stubborn(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """In the second group it takes its time to close its sandbox, and changes the sample after that."""
    CALLS.append((sample.index, sample.response))
    if sample.group_index != 1 or MAY_END.is_set():
        return answered(sample, "whole")
    sample.response = "half"
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        while not MAY_END.is_set():
            await asyncio.sleep(0.001)
    return answered(sample, "late")


stubborn.resumable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("partial", [False, True])
def test_a_hook_that_does_not_end_holds_nothing_up_and_changes_nothing(cluster, make_args, partial, caplog):
    args = make_args(
        custom_generate_function_path=f"{HERE}.stubborn", custom_rm_path=f"{HERE}.counted", partial_rollout=partial,
        rollout_batch_size=1, over_sampling_batch_size=2, rollout_request_timeout=1000.0,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    assert indices(generate_rollout(args, 0, source).samples) == [0, 1]
    (said,) = [r.message for r in caplog.records if r.name == cancelling.__name__]
    assert "samples [2, 3]" in said
    assert "in stubborn (" in said
    drawn = RolloutDataSource(args).get_samples(2)[1:]
    assert source.buffer == drawn
    late = [task for task in run(all_tasks()) if "samples [2, 3]" in task.get_name()]
    MAY_END.set()
    run(end_of(late))
    assert source.buffer == drawn
    assert calls(2) == [""]  # no reward was asked for
    source.get_samples(1)
    assert indices(generate_rollout(args, 1, source).samples) == [4, 5]


async def counted(args: Any, sample: Sample, **kwargs: Any) -> float:
    if sample.group_index == 1:
        CALLS.append((sample.index, "reward"))
    return 1.0


async def all_tasks() -> list[Any]:
    return list(asyncio.all_tasks())


async def end_of(tasks: list[Any]) -> None:
    for task in tasks:
        await asyncio.wait([task])


# Failures


async def raises_at_p2(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The first groups are finished, the third raises after them, the last is never finished."""
    CALLS.append((sample.index, sample.response))
    if sample.group_index == 2:
        while len(SEEN) < 2:
            await asyncio.sleep(0.001)
        sample.response = "scribbled"
        raise ValueError("bad prompt")
    if sample.group_index == 3:
        sample.response = "half"
        await asyncio.Event().wait()
    return answered(sample)


SEEN: list[Any] = []


def see(args: Any, group: list[Sample], **kwargs: Any) -> bool:
    SEEN.append(group)
    return True


def rollout_sample_filter_path(args: Any, groups: list[Any]) -> None:
    raise ValueError("bad prompt")


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_rollout_that_fails_hands_back_all_that_it_drew(cluster, make_args, partial, buffered):
    SEEN.clear()
    args = make_args(
        custom_generate_function_path=f"{HERE}.raises_at_p2", custom_rm_path=f"{HERE}.good", partial_rollout=partial,
        dynamic_sampling_filter_path=f"{HERE}.see",
    )  # fmt: skip
    source = (RolloutDataSourceWithBuffer if buffered else RolloutDataSource)(args)
    with pytest.raises(ValueError, match="bad prompt"):
        generate_rollout(args, 0, source)
    groups = source.get_samples(5)
    assert indices(groups) == list(range(10))
    assert [s.response for s in iter_samples(groups)] == ["r"] * 4 + [""] * 6
    assert groups[2:4] == RolloutDataSource(args).get_samples(4)[2:]
    assert GenerateState(args).unused == []


def raise_at_p1(args: Any, group: list[Sample], **kwargs: Any) -> bool:
    if group[0].group_index == 1:
        raise ValueError("bad filter")
    return True


def test_a_group_whose_filter_raises_is_handed_back_finished(cluster, make_args):
    args = make_args(dynamic_sampling_filter_path=f"{HERE}.raise_at_p1")
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(ValueError, match="bad filter") as caught:
        generate_rollout(args, 0, source)
    assert "while generating group 1 (samples [2, 3])" in caught.value.__notes__
    group = next(group for group in source.buffer if group[0].group_index == 1)
    assert all(sample.status == Status.COMPLETED and sample.reward is not None for sample in group)
    assert indices(source.buffer) == list(range(8))


@pytest.mark.parametrize("at", ["rollout_sample_filter_path", "rollout_all_samples_process_path"])
def test_so_does_one_whose_last_hooks_fail(cluster, make_args, at):
    args = make_args(**{at: f"{HERE}.{at}"}, over_sampling_batch_size=6)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(ValueError, match="bad prompt"):
        generate_rollout(args, 0, source)
    groups = source.get_samples(7)
    assert indices(groups) == list(range(14))
    assert sum(s.status == Status.COMPLETED for s in iter_samples(groups)) >= 8


def rollout_all_samples_process_path(args: Any, groups: list[Any], get_samples: Any) -> None:
    raise ValueError("bad prompt")


def test_a_source_that_fails_as_well_does_not_hide_the_failure(cluster, make_args, caplog):
    SEEN.clear()
    args = make_args(
        custom_generate_function_path=f"{HERE}.raises_at_p2", dynamic_sampling_filter_path=f"{HERE}.see",
        custom_rm_path=f"{HERE}.good",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples = source.take_back = lambda groups: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="bad prompt"):
        generate_rollout(args, 0, source)
    assert "the 4 groups of rollout 0, which failed, are lost" in caplog.text


async def cancels_itself(args: Any, group: list[Sample], sampling_params: Any, evaluation: bool = False) -> Any:
    raise asyncio.CancelledError


def test_a_group_that_is_cancelled_from_within_is_named(cluster, make_args, monkeypatch):
    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", cancels_itself)
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(RuntimeError, match="cancelled unexpectedly") as caught:
        generate_rollout(args, 0, source)
    assert "while generating group 0 (samples [0, 1])" in caught.value.__notes__
    assert indices(source.buffer) == list(range(8))


# Masks


def test_old_tokens_of_fan_outs_are_masked_as_those_of_samples_are(cluster, make_args):
    args = make_args(
        partial_rollout=True, mask_offpolicy_in_partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=1,
        custom_generate_function_path=f"{HERE}.half_once", custom_rm_path=f"{HERE}.good",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    group = source.get_samples(1)[0]
    fan_out = pair(group[1])
    for sample in fan_out:
        sample.reward = 1.0
    source.add_samples([[answered(group[0], "ab", Status.ABORTED), fan_out]])
    CALLS.append((0, ""))  # it does not give up
    output = generate_rollout(args, 0, source)
    single, siblings = output.samples[0]
    assert single.loss_mask == [0, 0, 1, 1, 1, 1, 1]
    assert [s.loss_mask for s in siblings] == [[0, 0, 0], [0, 0, 0]]
    assert output.metrics["rollout/staleness/masked_tokens"] == 2 + 3 + 3


# Which task makes what


async def test_late_results_of_a_group_are_dropped():
    group = [Sample(index=i) for i in range(3)]
    job, never = GroupJob(group), asyncio.Event()

    async def generate(job: GroupJob) -> None:
        await never.wait()

    def note(ended: dict[int, Any], number: int, result: Any) -> None:
        done = asyncio.get_running_loop().create_future()
        done.set_result(result)
        note_result(ended, number, Sample(index=number), done)

    earlier = job.ended
    task = job.begin(generate)
    note(earlier, 0, Sample(response="of another attempt"))
    note(job.ended, 1, [group[1], group[1]])
    group[2].response = "still being changed"
    assert job.to_continue() == [Sample(index=0), [group[1], group[1]], Sample(index=2)]
    task.cancel()


async def test_an_attempt_that_ignores_its_cancellation_leaves_the_next_one_alone(make_args, monkeypatch):
    async def generate_group(args: Any, group: list[Sample], params: Any, evaluation: bool = False) -> list[Sample]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0 if MAY_END.is_set() else 3600)
        return group

    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", generate_group)
    args, job = make_args(), GroupJob([Sample(index=0)])
    first = job.begin(functools.partial(sglang_rollout.generate_job, args))
    await asyncio.sleep(0)
    MAY_END.set()
    job.original = [Sample(index=0, response="again")]
    second = job.begin(functools.partial(sglang_rollout.generate_job, args))
    await second
    first.cancel()
    assert [sample.response for sample in await first] == [""]
    assert [sample.response for sample in job.result] == ["again"]
