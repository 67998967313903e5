"""Rewards that a rollout left behind, and the responses that they are of."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample

HERE = __name__
MADE: list[int | None] = []
REGENERATED, OVER = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def anew():
    MADE.clear()
    REGENERATED.clear()
    OVER.clear()
    yield
    OVER.set()


async def numbered(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Every generation writes another response."""
    MADE.append(sample.index)
    if MADE.count(sample.index) > 1:
        REGENERATED.set()
    sample.tokens = [112, 48]
    sample.append_response_tokens(tokens=[len(MADE)], log_probs=[-0.1], text=f"r{len(MADE)}")
    sample.status = Sample.Status.COMPLETED
    return sample


async def grade(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """The second group is graded when its second responses are there, the others after it at once or never."""
    response, event = sample.response, {0: None, 1: REGENERATED}.get(sample.group_index, OVER)
    while event is not None and not event.is_set():
        await asyncio.sleep(0.001)
    return {"of": response, "score": 1.0}


async def grade_all(args: Any, samples: list[Sample], **kwargs: Any) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(grade(args, sample) for sample in samples)))


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_response_that_begins_again_is_not_given_the_reward_of_the_old_one(cluster, make_args, group_rm):
    args = make_args(
        partial_rollout=True, mask_offpolicy_in_partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=2,
        custom_generate_function_path=f"{HERE}.numbered", reward_key="score", group_rm=group_rm,
        custom_rm_path=f"{HERE}.grade_all" if group_rm else f"{HERE}.grade",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    assert [(s.status, s.reward) for s in iter_samples(source.buffer)] == [(Sample.Status.COMPLETED, None)] * 2
    output = generate_rollout(args, 1, source)
    assert output.metrics["rollout/staleness/regenerated_groups"] == 1
    assert [sample.index for sample in iter_samples(output.samples)] == [2, 3]
    for sample in iter_samples(output.samples):
        assert sample.reward["of"] == sample.response
