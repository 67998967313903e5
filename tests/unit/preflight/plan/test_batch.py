"""Batch identity: counted one by one here, and as the trainer's schedule divides it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.arguments.groups.rollout import DEFAULT_ROLLOUT
from slime.arguments.rules.loop import SFT_ROLLOUT
from slime.batching.schedule import build_dp_schedule
from slime.preflight.plan.loop import BatchPlan, batch_of, batch_rows
from tests.support.arguments import run_args


def rows(batch: BatchPlan) -> dict[str, str]:
    return dict(batch_rows(batch))


@st.composite
def trained_batches(draw: st.DrawFn) -> BatchPlan:
    dp, micro = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = dp * micro * draw(st.integers(1, 4))
    prompts, samples = draw(st.integers(1, 20)), draw(st.integers(1, 8))
    start = draw(st.integers(0, 3))
    return BatchPlan(
        prompts=prompts,
        samples_per_prompt=samples,
        global_batch_size=min(size, size * (prompts * samples // size)) or None,
        data_parallel_size=dp,
        micro_batch_size=micro,
        start_rollout_id=start,
        num_rollout=start + draw(st.integers(1, 6)),
    )


@given(trained_batches().filter(lambda batch: batch.global_batch_size is not None))
def test_every_sample_is_counted_once(batch: BatchPlan) -> None:
    """Generate and train one by one; what fills no step waits for the next rollout."""
    assert batch.global_batch_size is not None
    assert batch.num_rollout is not None
    assert batch.start_rollout_id is not None
    waiting = steps = made = 0
    after_first = None
    for _ in range(batch.start_rollout_id, batch.num_rollout):
        for _ in range(batch.prompts):
            for _ in range(batch.samples_per_prompt):
                waiting += 1
                made += 1
        while waiting >= batch.global_batch_size:
            waiting -= batch.global_batch_size
            steps += 1
        after_first = after_first or (steps, waiting)
    assert (batch.steps, batch.left_over) == after_first
    said = rows(batch)["the run"]
    assert f"= {made:,} sample" in said
    assert f"= {steps:,} optimizer step" in said
    assert (f"+ {waiting} at the end that no step trains" in said) == (waiting > 0)


@given(trained_batches().filter(lambda batch: batch.global_batch_size is not None))
def test_the_schedule_divides_a_rollout_as_planned(batch: BatchPlan) -> None:
    assert batch.global_batch_size is not None
    schedule = build_dp_schedule(
        run_args(micro_batch_size=batch.micro_batch_size),
        {"dp_size": batch.data_parallel_size, "cp_size": 1},
        [5] * batch.samples,
        global_batch_size=batch.global_batch_size,
        rollout_indices=range(batch.samples),
    )
    assert schedule.num_microbatches == [batch.micro_batches_per_rank] * batch.steps
    assert schedule.global_batch_sizes == [batch.global_batch_size] * batch.steps
    assert {len(part) for part in schedule.partitions} == {batch.steps * (batch.samples_per_rank or 0)}
    assert sum(len(part) for part in schedule.partitions) == batch.samples - batch.left_over


GRPO = BatchPlan(
    prompts=64,
    samples_per_prompt=8,
    global_batch_size=128,
    data_parallel_size=4,
    micro_batch_size=2,
    num_rollout=3000,
    wave=64,
)


def test_the_identity_has_units() -> None:
    said = rows(GRPO)
    assert said["one rollout"] == "64 prompts x 8 samples = 512 samples = 4 optimizer steps x 128 samples"
    assert said["one step"] == "128 samples = 4 data-parallel ranks x 16 micro-batches x 2 samples"
    assert said["submission"] == "all prompts of a rollout at once"
    assert said["the run"] == "3,000 rollouts (0-2999) = 1,536,000 samples = 12,000 optimizer steps x 128 samples"
    assert "left over" not in said


def test_what_fills_no_step_is_said() -> None:
    said = rows(replace(GRPO, global_batch_size=200, data_parallel_size=5, num_rollout=3))  # 3 x 512 = 7 x 200 + 136
    assert (
        said["one rollout"] == "64 prompts x 8 samples = 512 samples = 2 optimizer steps x 200 samples + 112 left over"
    )
    assert said["left over"].startswith("112 samples of the first rollout fill no step; they wait")
    assert said["the run"].endswith("= 7 optimizer steps x 200 samples + 136 at the end that no step trains")
    said = rows(replace(GRPO, global_batch_size=73, data_parallel_size=1))  # 512 = 7 x 73 + 1
    assert said["left over"].startswith("1 sample of the first rollout fills no step; it waits")


def test_packed_micro_batches() -> None:
    packed = replace(GRPO, micro_batch_size=None, max_tokens_per_gpu=8192)
    said = rows(packed)
    assert said["one step"] == (
        "128 samples over 4 data-parallel ranks, packed into micro-batches of up to 8,192 tokens"
    )
    along = rows(replace(packed, context_parallel_size=2))
    assert along["one step"].endswith("16,384 tokens (8,192 on each of its 2 context-parallel slots)")


def test_conversations() -> None:
    said = rows(replace(GRPO, unit="conversation", samples_per_prompt=1, wave=None, global_batch_size=32))
    assert said["one rollout"] == "64 conversations = 2 optimizer steps x 32 conversations"
    assert "submission" not in said


def test_waves_of_more_prompts_than_needed() -> None:
    said = rows(replace(GRPO, wave=96, filtered=True))["submission"]
    assert said.startswith("96 prompts at a time, again whenever fewer than 64 are accepted or under way")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_rollout": None, "num_epoch": 3}, "3 passes over the prompts (--num-epoch), each of as many rollouts"),
        ({"num_rollout": None, "num_epoch": 1}, "1 pass over the prompts"),
        ({"start_rollout_id": None, "num_rollout": 10}, "rollouts up to number 9, from the one after the checkpoint's"),
        ({"start_rollout_id": 10, "num_rollout": 10}, "nothing to do: it starts at rollout 10 and --num-rollout is 10"),
        ({"num_rollout": 0}, "no rollout (--num-rollout 0): evaluated once"),
        ({"num_rollout": 1}, "1 rollout (0) = 512 samples = 4 optimizer steps x 128 samples"),
        ({"from_dumps": True, "num_rollout": 5}, "5 rollouts (0-4)"),
        ({"global_batch_size": None, "num_rollout": 5}, "5 rollouts (0-4) = 2,560 samples"),
    ],
)
def test_the_length_of_the_run(changes: dict[str, Any], sentence: str) -> None:
    assert rows(replace(GRPO, **changes))["the run"].startswith(sentence)


def test_generators_that_fan_out_count_trajectories() -> None:
    assert "counting" not in rows(GRPO)
    assert "a sample here is one trajectory" in rows(replace(GRPO, fans_out=True))["counting"]


def flags(**overrides: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "rollout_function_path": DEFAULT_ROLLOUT,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 4,
        "global_batch_size": 32,
        "data_parallel_size": 2,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 8,
        "max_tokens_per_gpu": 4096,
        "context_parallel_size": 2,
        "num_rollout": 10,
        "num_epoch": None,
        "start_rollout_id": 0,
        "over_sampling_batch_size": 16,
        "dynamic_sampling_filter_path": None,
        "custom_generate_function_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "load_debug_rollout_data": None,
        "debug_rollout_only": False,
    }
    return SimpleNamespace(**{**values, **overrides})


def test_from_the_flags() -> None:
    batch = batch_of(flags())
    assert (batch.samples, batch.steps, batch.micro_batches_per_rank, batch.max_tokens_per_gpu) == (64, 2, 2, None)
    assert batch_of(flags(use_dynamic_batch_size=True)).max_tokens_per_gpu == 4096
    assert batch_of(flags(use_dynamic_batch_size=True)).micro_batches_per_rank is None
    assert batch_of(flags(rollout_function_path=SFT_ROLLOUT)).unit == "conversation"
    assert batch_of(flags(rollout_function_path=SFT_ROLLOUT)).wave is None
    assert batch_of(flags(custom_generate_function_path="my.generate")).fans_out
    no_training = flags(debug_rollout_only=True, global_batch_size=None)
    del no_training.data_parallel_size
    assert batch_of(no_training).steps == 0
