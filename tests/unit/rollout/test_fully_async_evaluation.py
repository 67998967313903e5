"""An evaluation while the fully asynchronous rollout continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream, sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.staleness import WeightClock
from slime.utils.types import Sample
from tests.support.rollout_args import eval_config

HERE = __name__
PROMPTS = 100
SEEN: list[tuple[bool, int | None]] = []


@pytest.fixture
def clock(monkeypatch):
    """A clock of the test's own; whatever a test leaves in flight ends with it."""
    fresh = WeightClock()
    monkeypatch.setattr(group_stream, "weight_clock", lambda: fresh)
    SEEN.clear()
    yield fresh
    fully_async_rollout.stop_global_worker()


async def judge_while_groups_begin(args: Any, sample: Sample, **_: Any) -> float:
    """A reward of an evaluation that is there only when groups of training have begun meanwhile."""
    worker, source = args.worker, args.worker.data_source
    drawn = source.sample_group_index
    async with asyncio.timeout(60):
        while source.sample_group_index == drawn:
            worker.get_completed_groups()  # makes room, each time: others may have taken all there were
            await asyncio.sleep(0.001)
    if sample.index == 1:
        raise ValueError("no verdict")
    return 1.0


async def training_reward(args: Any, sample: Sample, **_: Any) -> float:
    if sample.group_index == 3:
        raise ValueError("no reward")
    return 0.5


def remember_call(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    SEEN.append((evaluation, rollout_id))


@pytest.mark.parametrize("function", [generate_rollout_fully_async, sglang_rollout.generate_rollout])
def test_groups_begin_during_an_evaluation_of_any_kind(cluster, make_args, clock, function):
    """The counts of both and the arguments of their hooks are kept apart."""
    args = make_args(
        prompts=PROMPTS, sglang_server_concurrency=8, rollout_sample_hook_path=[f"{HERE}.remember_call"],
        custom_rm_path=f"{HERE}.training_reward",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout_fully_async(args, 0, source)
    args.worker = worker = fully_async_rollout.get_global_worker(args, source)
    cluster.wait_until(lambda: not worker.in_flight, "as many groups as may be are there")
    args.eval_datasets = [
        eval_config(args.prompt_data, "one", custom_rm_path=f"{HERE}.judge_while_groups_begin", max_response_len=8)
    ]
    output = function(args, 7, source, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput)
    assert output.data["one"]["rewards"] == [1.0, 0.0] + [1.0] * (2 * PROMPTS - 2)
    assert output.metrics["eval/reward/failures"] == 1
    second = generate_rollout_fully_async(args, 1, source)
    failures = [output.metrics["rollout/reward/failures"] for output in (first, second)]
    assert sum(failures) == 2
    assert {rollout_id for evaluation, rollout_id in SEEN if evaluation} == {7}
    assert {rollout_id for evaluation, rollout_id in SEEN if not evaluation} <= {0, 1}
