"""The data-parallel schedule: its invariants over random inputs, and small cases by hand."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.errors import ScheduleError
from slime.batching.schedule import build_dp_schedule, leftover_positions
from slime.models.flops import flops_model
from tests.support.arguments import run_args

MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 32,
    "vocab_size": 100,
}


def make_args(**flags: Any) -> Namespace:
    defaults = {
        "use_dynamic_batch_size": False,
        "micro_batch_size": 1,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
    }
    return run_args(**MODEL, **{**defaults, **flags})


def make_config(dp: int = 1, cp: int = 1, vpp: int = 1, group: int = 1) -> dict[str, int]:
    return {"dp_size": dp, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rollouts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=16))  # samples per rollout
    ids = [rollout for rollout, count in enumerate(rollouts) for _ in range(count)]
    ids = draw(st.permutations(ids))
    lengths = draw(st.lists(st.integers(1, 64), min_size=len(ids), max_size=len(ids)))
    dynamic = draw(st.booleans())
    by_flops = dynamic and draw(st.booleans())
    return {
        "args": make_args(
            use_dynamic_batch_size=dynamic,
            max_tokens_per_gpu=draw(st.integers(16, 80)) if dynamic else None,
            micro_batch_size=draw(st.integers(1, 3)),
            balance_by_flops=by_flops,
            balance_data=by_flops or draw(st.booleans()),
        ),
        "config": make_config(
            draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])),
            draw(st.sampled_from([1, 2])),
        ),
        "lengths": lengths,
        "ids": list(ids),
        "gbs": draw(st.integers(1, 6)),
    }  # fmt: skip


def check_invariants(case: dict[str, Any]) -> bool:
    """Return whether there was a schedule to check."""
    args, config, lengths, ids, gbs = (case[key] for key in ("args", "config", "lengths", "ids", "gbs"))
    order = list(dict.fromkeys(ids))
    leftover = leftover_positions(ids, gbs)
    trained_ids = set(order[: len(order) // gbs * gbs])
    assert leftover == [i for i, rollout in enumerate(ids) if rollout not in trained_ids]
    try:
        schedule = build_dp_schedule(args, config, lengths, global_batch_size=gbs, rollout_indices=ids)
    except ScheduleError as error:
        check_refusal(case, str(error))
        return False
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = schedule
    dp = config["dp_size"]
    steps = len(order) // gbs
    assert global_batch_sizes == [gbs] * steps
    assert len(num_microbatches) == steps
    assert len(partitions) == len(micro_batch_indices) == dp

    # every trained sample exactly once, no leftover
    assert sorted([*itertools.chain.from_iterable(partitions), *leftover]) == list(range(len(ids)))
    multiple = config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1
    assert all(count % multiple == 0 and count > 0 for count in num_microbatches)
    for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
        assert len(micro_batches) == sum(num_microbatches)
        assert all(micro_batches)
        assert list(itertools.chain.from_iterable(micro_batches)) == list(range(len(partition)))

    capacity = args.max_tokens_per_gpu * config["cp_size"] if args.use_dynamic_batch_size else None
    start = 0
    for step, count in enumerate(num_microbatches):
        step_ids = set(order[step * gbs : (step + 1) * gbs])
        samples = sum(rollout in step_ids for rollout in ids)
        more_would_fit = (count + multiple) * dp <= samples
        for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
            for micro_batch in micro_batches[start : start + count]:
                positions = [partition[i] for i in micro_batch]
                assert {ids[p] for p in positions} <= step_ids  # a rollout stays in its step
                tokens = sum(lengths[p] for p in positions)
                if not args.use_dynamic_batch_size:
                    assert len(positions) <= args.micro_batch_size
                elif not args.balance_by_flops:
                    assert tokens <= capacity or len(positions) == 1 or not more_would_fit
        start += count
    return True


def check_refusal(case: dict[str, Any], message: str) -> None:
    """A refusal must be one that the flags really force."""
    args, config, ids, gbs = case["args"], case["config"], case["ids"], case["gbs"]
    order = list(dict.fromkeys(ids))
    steps = [set(order[i * gbs : (i + 1) * gbs]) for i in range(len(order) // gbs)]
    counts = [sum(rollout in step for rollout in ids) for step in steps]
    multiple = config["dp_size"] * (config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1)
    if "less than one step" in message:
        assert not steps
    elif "data-parallel ranks;" in message:
        assert min(counts) < config["dp_size"]
    elif "cannot fill" in message:  # not even one micro-batch for each
        assert args.use_dynamic_batch_size
        assert any(count < multiple for count in counts)
    else:
        assert "expected a multiple of" in message
        assert any(-(-count // args.micro_batch_size) % multiple for count in counts)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_invariants(case: dict[str, Any]) -> None:
    check_invariants(case)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(cases())
def test_invariants_full(case: dict[str, Any]) -> None:
    check_invariants(case)


def test_static_micro_batches_by_hand() -> None:
    schedule = build_dp_schedule(
        make_args(micro_batch_size=2), make_config(dp=2), [5] * 10, global_batch_size=4,
        rollout_indices=list(range(10)),
    )  # fmt: skip
    assert schedule.partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert schedule.micro_batch_indices == [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    assert schedule.num_microbatches == [1, 1]
    assert schedule.global_batch_sizes == [4, 4]
    assert leftover_positions(list(range(10)), 4) == [8, 9]


def test_dynamic_micro_batches_by_hand() -> None:
    # capacity 10 tokens x cp 1: first fit gives [6, 4], [5, 5], [9]; 3 bins must become 4 for 2 ranks, and the bin with
    # most tokens (the first of those with 10) is split
    schedule = build_dp_schedule(
        make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=10), make_config(dp=2), [6, 5, 4, 5, 9],
        global_batch_size=5, rollout_indices=[0, 1, 2, 3, 4],
    )  # fmt: skip
    assert schedule.num_microbatches == [2]
    micro_batches = [
        sorted([6, 5, 4, 5, 9][p] for p in (partition[i] for i in indices))
        for partition, rank in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
        for indices in rank
    ]
    assert sorted(micro_batches) == [[4], [5, 5], [6], [9]]


def test_context_parallelism_multiplies_the_capacity() -> None:
    args = make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    for cp, expected in ((1, 4), (2, 2), (4, 1)):
        schedule = build_dp_schedule(args, make_config(cp=cp), [10] * 4, global_batch_size=4, rollout_indices=range(4))
        assert schedule.num_microbatches == [expected]


def test_micro_batches_grow_when_a_step_has_too_few_samples_for_more(caplog: pytest.LogCaptureFixture) -> None:
    """Five samples fill the limit alone, but two ranks share 4 or 6 micro-batches: the two shortest go together."""
    args = make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=10)
    lengths = [10, 9, 8, 7, 6]
    schedule = build_dp_schedule(args, make_config(dp=2), lengths, global_batch_size=5, rollout_indices=range(5))
    micro_batches = [
        sorted(lengths[partition[i]] for i in indices)
        for partition, rank in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
        for indices in rank
    ]
    assert sorted(micro_batches) == [[6, 7], [8], [9], [10]]
    assert "the largest has 13 tokens (limit 10)" in caplog.text


def test_siblings_of_one_rollout_count_once_and_stay_together() -> None:
    ids = ["a", "b", "a", "c", "d", "b"]
    schedule = build_dp_schedule(make_args(), make_config(), [3] * 6, global_batch_size=2, rollout_indices=ids)
    assert schedule.num_microbatches == [4, 2]
    assert schedule.partitions == [[0, 2, 1, 5, 3, 4]]


def test_balance_data_evens_out_the_ranks() -> None:
    lengths = [64, 1, 64, 1, 2, 63, 2, 63]
    loads = {}
    for balance in (False, True):
        args = make_args(balance_data=balance)
        schedule = build_dp_schedule(
            args, make_config(dp=2), lengths, global_batch_size=8, rollout_indices=list(range(8))
        )
        per_rank = [sum(flops_model(args).forward([lengths[p] for p in part])) for part in schedule.partitions]
        loads[balance] = max(per_rank) / min(per_rank)
    assert loads[True] < 1.01 < loads[False]


def test_balance_by_flops_divides_work_rather_than_tokens() -> None:
    args = make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=64, balance_by_flops=True, balance_data=True)
    lengths = [64, 8, 8, 8, 8, 8, 8, 8, 8]
    schedule = build_dp_schedule(args, make_config(dp=2), lengths, global_batch_size=9, rollout_indices=range(9))
    assert schedule.num_microbatches == [1]
    assert sorted(len(part) for part in schedule.partitions) == [1, 8]  # 128 tokens, two bins, the long one alone


@pytest.mark.parametrize(
    ("kwargs", "config", "count", "gbs", "match"),
    [
        ({}, make_config(), 3, 4, "3 trajectories are less than one step of --global-batch-size 4"),
        ({}, make_config(dp=4), 3, 3, "step 0 has 3 samples for 4 data-parallel ranks"),
        ({"micro_batch_size": 2}, make_config(dp=2), 6, 6, "make 3 micro-batches, expected a multiple of 2"),
        ({}, make_config(dp=1, vpp=2, group=4), 6, 6, "expected a multiple of 4"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 8},
            make_config(dp=2, vpp=2, group=2),
            3,
            3,
            "3 samples cannot fill 4 micro-batches",
        ),
        ({}, make_config(), 3, 0, "at least 1"),
    ],
)
def test_refuses_what_cannot_be_shared(kwargs, config, count: int, gbs: int, match: str) -> None:
    with pytest.raises(ScheduleError, match=match) as caught:
        build_dp_schedule(
            make_args(**kwargs), config, [5] * count, global_batch_size=gbs, rollout_indices=list(range(count))
        )
    assert isinstance(caught.value, AssertionError)


def test_lengths_and_ids_must_match() -> None:
    with pytest.raises(ScheduleError, match="2 total lengths but 3 rollout ids"):
        build_dp_schedule(make_args(), make_config(), [1, 2], global_batch_size=1, rollout_indices=[0, 1, 2])
