"""The evaluation of the default rollout against stand-in engines."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from slime.ray.manager.rollout_metrics import eval_metrics, eval_summary
from slime.rollout.base_types import iter_samples
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tests.support.rollout_args import eval_config
from tests.support.standin import hashed_reply

HERE = __name__


def test_evaluation_scores_every_copy_in_order(cluster, make_args):
    args = make_args(prompts=5, rm_type=None)
    args.eval_datasets = [
        eval_config(args.prompt_data, "one"),
        eval_config(args.prompt_data, "two", n_samples_per_eval_prompt=1, custom_rm_path=f"{HERE}.prompt_number"),
    ]
    output = generate_rollout(args, 0, None, evaluation=True)
    one, two = output.data["one"], output.data["two"]
    assert [sample.prompt for sample in iter_samples(one["samples"])] == [f"p{i}" for i in range(5) for _ in range(2)]
    assert [s.index for s in one["samples"]] == list(range(10))
    assert one["rewards"] == [0.0] * 10
    longer = [len(hashed_reply([112, 48 + i], {})) > 5 for i in range(5) for _ in range(2)]
    assert one["truncated"] == longer
    assert two["rewards"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    params = cluster.requests[0]["sampling_params"]
    assert params["repetition_penalty"] == 1.1
    assert params["min_new_tokens"] == 1
    assert params["max_new_tokens"] == 5


async def prompt_number(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(sample.prompt[1:])


ASKED: list[int | None] = []


async def never(args: Any, sample: Sample, **kwargs: Any) -> float:
    ASKED.append(sample.index)
    return await asyncio.Event().wait()


def test_an_evaluation_without_progress_says_who_waits_for_what(cluster, make_args, monkeypatch):
    args = make_args(prompts=2, rm_type=None)
    args.eval_datasets = [eval_config(args.prompt_data, "one", custom_rm_path=f"{HERE}.never")]
    ASKED.clear()

    class Impatient(asyncio.Queue):
        async def get(self):
            while len(ASKED) < 4:
                await asyncio.sleep(0.001)
            raise TimeoutError

    monkeypatch.setattr(asyncio, "Queue", Impatient)
    with pytest.raises(TimeoutError, match=r"eval one .* 4 of 4 are in flight, .*\[0, 1, 2, 3\] wait for its reward"):
        generate_rollout(args, 0, None, evaluation=True)


async def three_of_the_first(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Act as an agent that forks its session: the first prompt's trajectory is three samples, others are one."""
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    sample.reward = float(sample.prompt == "p0")
    return [copy.copy(sample) for _ in range(3)] if sample.prompt == "p0" else sample


def test_a_trajectory_counts_once_however_many_samples_it_is(cluster, make_args):
    args = make_args(prompts=2, rm_type=None, custom_generate_function_path=f"{HERE}.three_of_the_first")
    args.eval_datasets = [eval_config(args.prompt_data, "x")]
    result = generate_rollout(args, 0, None, evaluation=True).data
    assert result["x"]["rewards"] == [1.0] * 6 + [0.0] * 2  # two copies of each prompt
    assert [sample.rollout_id for sample in result["x"]["samples"]] == [0] * 3 + [1] * 3 + [None] * 2
    assert eval_metrics(args, result)["eval/x"] == 0.5
    assert eval_summary(result) == ["x: mean reward 0.5, 8 samples of 4 trajectories, 0.0% of them truncated"]
