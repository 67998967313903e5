"""Columns and shards: what goes in comes out on the right rank, through pickling, and errors name the sample."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.samples_to_shards import ARGS as BENCH_ARGS
from benchmarks.samples_to_shards import PickleStore, make_samples
from slime.batching.columns import RolloutColumns, RolloutShard, fill_rollout_ids
from slime.batching.errors import TrainDataError
from slime.batching.ragged import Ragged, ragged_from_rows
from slime.batching.ragged_tensor import RaggedTensor, as_lists, flat
from slime.batching.schedule import DpSchedule
from slime.batching.train_data import build_train_data


def make_data(shapes: list[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    """Train data of samples with (total, response) lengths, as plain lists."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": [rng.integers(0, 2**31 - 1, total).tolist() for total, _ in shapes],
        "response_lengths": [response for _, response in shapes],
        "rewards": rng.normal(size=len(shapes)).tolist(),
        "raw_reward": rng.normal(size=len(shapes)).tolist(),
        "truncated": rng.integers(0, 2, len(shapes)).tolist(),
        "sample_indices": [100 + i for i in range(len(shapes))],
        "loss_masks": [rng.integers(0, 2, response).tolist() for _, response in shapes],
        "rollout_ids": [i // 2 for i in range(len(shapes))],
        "rollout_mask_sums": [float(1 + i) for i in range(len(shapes))],
        "rollout_log_probs": [(-rng.random(response)).tolist() for _, response in shapes],
        "multimodal_train_inputs": [{"pixels": i} if i % 2 else None for i in range(len(shapes))],
    }


def round_robin(count: int, dp_size: int) -> DpSchedule:
    partitions = [list(range(rank, count, dp_size)) for rank in range(dp_size)]
    return DpSchedule(partitions, [[[i] for i in range(len(p))] for p in partitions], [len(partitions[0])], [count])


def through_shared_memory(shard: RolloutShard) -> tuple[RolloutShard, int, int]:
    """Pickle as Ray does; return the copy (its arrays view read-only buffers) and the bytes in and out of band."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(head, buffers=shared), len(head), sum(map(len, shared))


def check_round_trip(shapes: list[tuple[int, int]], dp_size: int, seed: int) -> None:
    data = make_data(shapes, seed)
    schedule = round_robin(len(shapes), dp_size)
    shards = RolloutColumns.from_train_data(data).shards(schedule)
    assert len(shards) == dp_size
    for rank, (shard, partition) in enumerate(zip(shards, schedule.partitions, strict=True)):
        received, _, _ = through_shared_memory(shard)
        result = received.to_rollout_data("cpu")
        assert received.dp_rank == rank
        assert result["partition"] == partition
        assert result["micro_batch_indices"] == schedule.micro_batch_indices[rank]
        assert result["num_microbatches"] == schedule.num_microbatches
        assert result["global_batch_sizes"] == schedule.global_batch_sizes
        assert result["raw_reward"] == data["raw_reward"]
        assert received.batch_total_lengths.tolist() == [total for total, _ in shapes]
        assert result["total_lengths"] == [shapes[i][0] for i in partition]
        assert result["local_raw_reward"] == [data["raw_reward"][i] for i in partition]
        for key in ("response_lengths", "rewards", "truncated", "sample_indices", "rollout_ids"):
            assert result[key] == [data[key][i] for i in partition], key
        assert result["multimodal_train_inputs"] == [data["multimodal_train_inputs"][i] for i in partition]
        assert torch.equal(result["rollout_mask_sums"], torch.tensor([data["rollout_mask_sums"][i] for i in partition]))
        for key, dtype in (("tokens", torch.int64), ("loss_masks", torch.int32), ("rollout_log_probs", torch.float32)):
            for tensor, i in zip(result[key], partition, strict=True):
                assert tensor.dtype == dtype
                assert torch.equal(tensor, torch.tensor(data[key][i], dtype=dtype))


shapes_strategy = st.lists(
    st.integers(1, 12).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total - 1))),
    min_size=4,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(shapes_strategy, st.integers(1, 4), st.integers(0, 99))
def test_shards_return_what_was_packed(shapes, dp_size: int, seed: int) -> None:
    check_round_trip(shapes, dp_size, seed)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None)
@given(shapes_strategy, st.integers(1, 4), st.integers(0, 2**31))
def test_shards_return_what_was_packed_full(shapes, dp_size: int, seed: int) -> None:
    check_round_trip(shapes, dp_size, seed)


def test_shard_arrays_travel_out_of_band_and_arrive_read_only_without_a_copy() -> None:
    shapes = [(2000, 1500)] * 8
    shard = RolloutColumns.from_train_data(make_data(shapes)).shards(round_robin(8, 2))[0]
    received, in_band, out_of_band = through_shared_memory(shard)
    assert out_of_band >= 4 * 2000 * 4 + 4 * 1500 * (1 + 4)  # tokens, masks, log-probs of 4 samples
    assert in_band < 4096
    for column in received.batch.ragged.values():
        assert not column.values.flags.owndata
        assert not column.values.flags.writeable
    row = received.batch.ragged["tokens"][1]
    assert np.shares_memory(row, received.batch.ragged["tokens"].values)


@pytest.mark.parametrize("ranks", [1, 4])
def test_stored_bytes_are_4_per_token_and_5_per_response_token_and_little_per_sample(ranks: int) -> None:
    count, beyond = 64, []
    for prompt, response in ((20, 100), (200, 1000)):
        samples = make_samples(count, prompt, response)
        rewards = [float(s.reward) for s in samples]  # type: ignore[arg-type]
        batch = RolloutColumns.from_train_data(build_train_data(BENCH_ARGS, samples, rewards, rewards))
        stored = sum(PickleStore().through(shard)[1] for shard in batch.shards(round_robin(count, ranks)))
        tokens, answers = sum(len(s.tokens) for s in samples), sum(s.response_length for s in samples)
        assert answers < tokens - 10 * count  # else 9 bytes per token would pass for less
        beyond.append(stored - 4 * tokens - 5 * answers)
    # Nothing beyond them grows with the tokens. What grows with the samples: three offsets and six numbers in their
    # shard, the length and the raw reward of every sample in every shard. The rest is the same for every shard.
    assert abs(beyond[1] - beyond[0]) < 64
    assert beyond[1] < count * (100 + 20 * ranks) + 3000 * ranks


def test_values_are_exchanged_for_those_of_a_transport_of_tensors_and_back() -> None:
    shard = RolloutColumns.from_train_data(make_data([(9, 4), (5, 0), (7, 6)])).shards(round_robin(3, 1))[0]
    sent = shard.with_values(torch.from_numpy)
    assert {type(column.values) for column in sent.batch.ragged.values()} == {torch.Tensor}
    received = sent.with_values(np.asarray)
    for key, column in shard.batch.ragged.items():
        assert received.batch.ragged[key].values.dtype == column.values.dtype
        assert np.shares_memory(received.batch.ragged[key].values, column.values)
    assert received.to_rollout_data("cpu").keys() == shard.to_rollout_data("cpu").keys()


def test_tensors_are_writable_though_the_shard_is_not(recwarn: pytest.WarningsRecorder) -> None:
    shard, _, _ = through_shared_memory(
        RolloutColumns.from_train_data(make_data([(4, 2), (5, 3)])).shards(round_robin(2, 1))[0]
    )
    before = shard.batch.ragged["rollout_log_probs"].values.copy()
    shard.to_rollout_data()["rollout_log_probs"][0].fill_(7.0)
    assert np.array_equal(shard.batch.ragged["rollout_log_probs"].values, before)
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_accepts_arrays_tensors_and_lists_alike() -> None:
    data = make_data([(4, 2), (5, 3), (6, 3)])
    expected = RolloutColumns.from_train_data(data)
    mixed = {
        **data,
        "tokens": [torch.tensor(data["tokens"][0]), np.array(data["tokens"][1]), tuple(data["tokens"][2])],
        "loss_masks": [torch.tensor(m, dtype=torch.bool) for m in data["loss_masks"]],
        "rollout_log_probs": [torch.tensor(row) for row in data["rollout_log_probs"]],
        "rewards": torch.tensor(data["rewards"], dtype=torch.float64),
        "rollout_ids": np.array(data["rollout_ids"]),
    }
    actual = RolloutColumns.from_train_data(mixed)
    for key, column in expected.ragged.items():
        assert np.array_equal(actual.ragged[key].values, column.values), key
        assert actual.ragged[key].values.dtype == column.values.dtype
    for key, values in expected.numbers.items():
        assert np.array_equal(actual.numbers[key], values), key


def test_bfloat16_log_probs_are_widened() -> None:
    data = make_data([(4, 2)])
    data["rollout_log_probs"] = [torch.tensor([-0.5, -0.25], dtype=torch.bfloat16)]
    assert RolloutColumns.from_train_data(data).ragged["rollout_log_probs"].values.tolist() == [-0.5, -0.25]


def test_custom_converter_with_only_the_documented_keys() -> None:
    data = make_data([(4, 2), (5, 3)])
    minimal = {key: data[key] for key in ("tokens", "response_lengths", "rewards", "loss_masks")}
    minimal["loss_masks"] = [[1, 0], [1, 1, 1]]
    batch = RolloutColumns.from_train_data(minimal)
    assert batch.rollout_ids == [0, 1]
    result = batch.shards(round_robin(2, 1))[0].to_rollout_data()
    assert result["rollout_mask_sums"].tolist() == [1.0, 3.0]  # every sample by itself
    assert "raw_reward" not in result


def test_mask_sums_default_to_the_sample_even_when_rollout_ids_are_shared() -> None:
    data = make_data([(4, 2), (5, 3)])
    del data["rollout_mask_sums"]
    data["rollout_ids"], data["loss_masks"] = [7, 7], [[1, 0], [1, 1, 1]]
    assert RolloutColumns.from_train_data(data).numbers["rollout_mask_sums"].tolist() == [1.0, 3.0]


def test_turns_with_a_trained_token_are_counted_by_rollout_id() -> None:
    data = make_data([(4, 2), (5, 3), (4, 2), (4, 2), (3, 1)])
    data["rollout_ids"] = [7, None, 7, 7, -3]
    data["loss_masks"] = [[1, 0], [1, 1, 1], [0, 0], [0, 1], [0]]
    batch = RolloutColumns.from_train_data(data)
    assert batch.numbers["rollout_turn_counts"].tolist() == [2, 1, 2, 2, 0]
    given = RolloutColumns.from_train_data({**data, "rollout_turn_counts": [3, 1, 3, 3, 1]})
    assert given.numbers["rollout_turn_counts"].tolist() == [3, 1, 3, 3, 1]


def test_unknown_fields_travel_and_routed_experts_keep_shape_and_dtype() -> None:
    data = make_data([(4, 2), (5, 3)])
    data["my_weights"] = [0.5, 0.25]
    data["sample_indices"] = [3, None]
    data["rollout_routed_experts"] = [
        torch.arange(3 * 2 * 2, dtype=torch.uint8).reshape(3, 2, 2), torch.ones(4, 2, 2, dtype=torch.uint8)
    ]  # fmt: skip
    shard = RolloutColumns.from_train_data(data).shards(DpSchedule([[1], [0]], [[[0]], [[0]]], [1], [1]))[1]
    result = through_shared_memory(shard)[0].to_rollout_data()
    assert result["my_weights"] == [0.5]
    assert result["sample_indices"] == [3]
    assert torch.equal(result["rollout_routed_experts"][0], data["rollout_routed_experts"][0])
    assert result["rollout_routed_experts"][0].dtype == torch.uint8


@pytest.mark.parametrize("value", [3, [1], "ab", {"a": 1, "b": 2}, np.float32(1)])
def test_fields_of_the_users_own_that_are_not_per_sample_are_left_out(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As a dictionary from a converter of slime <= 0.3.1 may have them."""
    batch = RolloutColumns.from_train_data({**make_data([(4, 2), (5, 3)]), "mine": value})
    assert "mine" not in batch.objects
    assert "'mine' is left out" in caplog.text


def change(key: str, value: Any, at: int | None = 1):
    def apply(data: dict[str, Any]) -> None:
        if at is None:
            data[key] = value
        else:
            data[key][at] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "match"),
    [
        (change("loss_masks", [1]), r"sample index=101 .* loss_masks has 1 entries, expected 3"),
        (change("loss_masks", [1, 0, -1]), r"sample index=101 .* loss_masks\[2\] is -1"),
        (change("loss_masks", [1, 0, 0.5]), r"sample index=101 .* loss_masks holds 0.5"),
        (change("rollout_log_probs", [-1.0] * 4), r"sample index=101 .* rollout_log_probs has 4 entries, expected 3"),
        (change("rollout_log_probs", [-1.0, float("nan"), 0.0]), r"sample index=101 .* rollout_log_probs\[1\] is nan"),
        (change("rollout_log_probs", [-1.0, 0.4, 0.0]), r"index=101 .* rollout_log_probs\[1\] is 0.4.*at most 0"),
        (change("loss_masks", [1, 0, 2]), r"sample index=101 .* loss_masks\[2\] is 2, expected 1 for a token"),
        (change("rollout_log_probs", None), r"sample index=101 .* rollout_log_probs is None"),
        (change("rollout_log_probs", ["a", "b", "c"]), r"sample index=101 .* rollout_log_probs must hold numbers"),
        (change("rewards", float("inf")), r"sample index=101 .* rewards is inf"),
        (change("rewards", None), r"sample index=101 .* rewards is None"),
        (change("rollout_mask_sums", -1.0), r"sample index=101 .* rollout_mask_sums is -1.0, expected 0 or more"),
        (change("tokens", [1, 2, 3]), r"sample index=101 .* response length 3 with 3 tokens"),
        (change("tokens", [1, 2, 3, 4, 2**31]), r"sample index=101 .* tokens holds 2147483648"),
        (change("tokens", [1, 2, 3, 4, -5]), r"sample index=101 .* tokens\[4\] is -5"),
        (change("response_lengths", 2.5), r"sample index=101 .* response_lengths is 2.5"),
        (change("rewards", [1.0], None), r"'rewards' must hold one entry per sample \(2\), got 1 entries"),
        (change("truncated", 1, None), r"'truncated' must hold one entry per sample \(2\), got 1"),
        (change("loss_masks", None, None), "train data lacks loss_masks"),
        (change("tokens", [], None), "no sample"),
        (change("partition", [0, 1], None), r"train data has the key partition, with which .* schedule"),
    ],
)
def test_errors_name_the_sample_and_the_field(apply, match: str) -> None:
    data = make_data([(4, 2), (5, 3)])
    apply(data)
    with pytest.raises(TrainDataError, match=match):
        RolloutColumns.from_train_data(data)


def test_errors_are_what_old_callers_catch() -> None:
    assert issubclass(TrainDataError, AssertionError)
    assert issubclass(TrainDataError, ValueError)


def test_take_reorders() -> None:
    data = make_data([(4, 2), (5, 3), (6, 1)])
    batch = RolloutColumns.from_train_data(data).take([2, 0])
    assert len(batch) == 2
    assert batch.ragged["tokens"][0].tolist() == data["tokens"][2]
    assert batch.raw_reward == [data["raw_reward"][2], data["raw_reward"][0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), min_size=1, max_size=6), st.data())
def test_ragged_take_and_sums(rows: list[list[int]], data: st.DataObject) -> None:
    column = ragged_from_rows(rows, "int32", "tokens")
    assert [column[i].tolist() for i in range(len(column))] == rows
    assert column.row_sums().tolist() == [sum(row) for row in rows]
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = column.take(np.array(positions, dtype=np.int64))
    assert [taken[i].tolist() for i in range(len(taken))] == [rows[i] for i in positions]
    assert taken.values.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["int8", "int32"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_integers_are_exact_or_refused_whatever_holds_them(dtype: str, data: st.DataObject) -> None:
    """Fast ways and slow ones agree, at the ends of the range, for plain numbers, NumPy's and truth values."""
    info = np.iinfo(dtype)
    near = [info.min, info.max, info.min - 1, info.max + 1, 127, 128, 255, 256, 2**31, -(2**31) - 1, -1, 0]
    numbers = st.one_of(st.integers(info.min, info.max), st.sampled_from(near), st.booleans())
    row = data.draw(st.lists(numbers, min_size=1, max_size=6))
    if data.draw(st.booleans()):
        row = [np.int64(n) if -(2**63) <= n < 2**63 else n for n in row]
    if data.draw(st.booleans()):
        row = row + [data.draw(st.sampled_from([0.5, 2.0, float("nan")]))]
    fits = all(n == n and n == int(n) and info.min <= n <= info.max for n in row)
    if fits:
        assert ragged_from_rows([[], row, [3]], dtype, "tokens").values.tolist() == [*map(int, row), 3]
    else:
        with pytest.raises(TrainDataError, match="sample 1: tokens"):
            ragged_from_rows([[], row, [3]], dtype, "tokens")


def test_ragged_refuses_rows_beyond_the_last() -> None:
    column = Ragged(np.zeros(3), np.array([0, 3]))
    with pytest.raises(IndexError, match="row 1 of 1"):
        column[1]


def test_fill_rollout_ids_uses_the_smallest_unused() -> None:
    assert fill_rollout_ids([None, 0, None, 3, None, 0]) == [1, 0, 2, 3, 4, 0]


def test_columns_of_tensors_are_sequences_of_their_rows() -> None:
    rows = [torch.arange(3), torch.empty(0, dtype=torch.long), torch.arange(10, 14)]
    column = RaggedTensor.of(rows)
    assert len(column) == 3
    assert all(torch.equal(a, b) for a, b in zip(column, rows, strict=True))
    assert torch.equal(column[2], rows[2])
    column[0].fill_(7)
    assert column.values[:3].tolist() == [7, 7, 7]  # rows are views
    following, picked = column.take([1, 2]), column.take([2, 0])
    assert following.values.data_ptr() == column.values[3:].data_ptr()  # and so are rows that follow one another
    assert (following.values.tolist(), following.lengths) == ([10, 11, 12, 13], [0, 4])
    assert (picked.values.tolist(), picked.lengths) == ([10, 11, 12, 13, 7, 7, 7], [4, 3])
    assert flat(column) is column.values
    assert flat(list(column)).tolist() == column.values.tolist()


def test_hooks_see_lists() -> None:
    data = {"tokens": RaggedTensor(torch.arange(5), [2, 3]), "rewards": [0.0, 1.0], "whole": torch.ones(2)}
    before = dict(data)
    as_lists(data)
    assert [row.tolist() for row in data["tokens"]] == [[0, 1], [2, 3, 4]]
    assert type(data["tokens"]) is list
    assert all(data[name] is before[name] for name in ("rewards", "whole"))


def test_tensors_of_multimodal_inputs_go_to_the_device() -> None:
    data = make_data([(5, 2), (4, 1)])
    data["multimodal_train_inputs"] = [{"pixel_values": torch.ones(2, 3), "note": "a cat"}, None]
    data["a scalar"] = np.array(3.0)  # no entry per sample: left out
    (shard,) = RolloutColumns.from_train_data(data).shards(round_robin(2, 1))
    moved = shard.to_rollout_data("meta")
    assert moved["multimodal_train_inputs"][0]["pixel_values"].device.type == "meta"
    assert moved["multimodal_train_inputs"][0]["note"] == "a cat"
    assert moved["multimodal_train_inputs"][1] is None
    assert "a scalar" not in moved
