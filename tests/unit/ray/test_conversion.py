"""Samples become shards; what does not fill a training step is trained in the next one, once."""

from __future__ import annotations

import logging
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.errors import ScheduleError
from slime.ray.conversion import Converter, carried_over_path, write_carried_over
from slime.utils.types import Sample


def arguments(**changes):
    base = {
        "custom_convert_samples_to_train_data_path": None,
        "custom_reward_post_process_path": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 3,
        "reward_key": None,
        "global_batch_size": 4,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
        "rollout_top_p": 1.0,
        "use_rollout_routing_replay": False,
    }
    return SimpleNamespace(**{**base, **changes})


def rollout(first_index: int, rewards: list[float], group_size: int = 2) -> list[Sample]:
    """Samples in groups of ``group_size``, recognisable by their index, which is also their second token."""
    return [
        Sample(
            index=first_index + i,
            group_index=first_index + i // group_size,
            tokens=[7, first_index + i, 9],
            response_length=1,
            reward=reward,
            status=Sample.Status.COMPLETED,
        )
        for i, reward in enumerate(rewards)
    ]


def converter(dp_size: int = 2, **changes) -> Converter:
    made = Converter(arguments(**changes))
    made.train_parallel_config = {
        "dp_size": dp_size,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    return made


def trained(shards) -> dict[int, float]:
    """Return ``{sample index: reward}`` over all shards; a sample that appears twice fails."""
    found = {}
    for shard in shards:
        data = shard.to_rollout_data()
        for index, reward in zip(data["sample_indices"], data["rewards"], strict=True):
            assert index not in found
            found[index] = reward
    return found


def test_rewards_are_relative_to_the_group():
    # groups (1, 0) and (0, 0): mean 0.5 and 0
    assert trained(converter().shards(rollout(0, [1, 0, 0, 0]))) == {0: 0.5, 1: -0.5, 2: 0.0, 3: 0.0}


def test_samples_beyond_the_last_step_come_first_in_the_next_rollout():
    c = converter()
    first = trained(c.shards(rollout(0, [1, 0, 0, 0, 1, 0])))  # 6 rollouts, steps of 4
    assert sorted(first) == [0, 1, 2, 3]
    second = trained(c.shards(rollout(100, [0, 1, 0, 1, 0, 0])))  # 2 + 6 rollouts: two whole steps
    assert sorted(second) == [4, 5, 100, 101, 102, 103, 104, 105]
    # Their rewards are those of their own group, of which nothing else is left.
    assert (second[4], second[5]) == (0.5, -0.5)
    assert c.carried.samples == []


def test_ids_of_carried_rollouts_do_not_meet_those_of_the_next():
    c = converter(global_batch_size=2, dp_size=1)
    samples = rollout(0, [1, 0, 1, 0, 1, 1], group_size=6)
    for s, rollout_id in zip(samples, [0, 0, 1, 1, 2, 2], strict=True):
        s.rollout_id = rollout_id
    assert sorted(trained(c.shards(samples))) == [0, 1, 2, 3]
    again = rollout(10, [1, 0], group_size=2)
    for s in again:
        s.rollout_id = 2  # the id that was carried over, used anew
    shards = c.shards(again)
    assert sorted(trained(shards)) == [4, 5, 10, 11]
    assert shards[0].global_batch_sizes == [2]  # two rollouts of two samples each, not one of four


def test_state_survives_a_restart(tmp_path):
    c = converter()
    c.shards(rollout(0, [1, 0, 0, 0, 1, 0]))
    path = carried_over_path(str(tmp_path), 5)
    write_carried_over(path, c.state())
    resumed = converter()
    resumed.restore(path.read_bytes())
    expected = trained(c.shards(rollout(100, [0, 1, 0, 1, 0, 0])))
    assert trained(resumed.shards(rollout(100, [0, 1, 0, 1, 0, 0]))) == expected
    write_carried_over(path, c.state())
    assert not path.exists()  # nothing was left over: a stale file must not come back


def test_custom_reward_post_processing_and_conversion():
    c = converter(custom_reward_post_process_path=f"{__name__}.negated")
    assert trained(c.shards(rollout(0, [1, 0, 0, 0]))) == {0: -1.0, 1: 0.0, 2: 0.0, 3: 0.0}
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.bare_converter")
    assert sorted(trained(c.shards(rollout(0, [1, 2, 3, 4, 5, 6]))).values()) == [1.0, 2.0, 3.0, 4.0]
    assert [s.index for s in c.carried.samples] == [4, 5]


def negated(args, samples):
    return [s.reward for s in samples], [-s.reward for s in samples]


def bare_converter(args, samples):
    """Returns only the required keys, and sample_indices for the test."""
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [float(s.reward) for s in samples],
        "loss_masks": [[1] for _ in samples],
        "sample_indices": [s.index for s in samples],
    }


def test_layout_must_be_known_first():
    with pytest.raises(RuntimeError, match="set_train_parallel_config"):
        Converter(arguments()).shards(rollout(0, [1, 0]))


def test_shards_equal_the_slow_way():
    """Two ranks, micro-batches of 2, two steps: worked out sample by sample."""
    lengths = [3, 5, 2, 4, 6, 1, 2, 3]
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0]
    samples = [
        Sample(
            index=i,
            group_index=i // 4,
            tokens=[100 + i, 0, *range(1, n + 1)],
            response_length=n,
            reward=reward,
            loss_mask=[int(j % 2 == 0) for j in range(n)],
            rollout_log_probs=[-0.25 * (i + j) for j in range(n)],
            status=Sample.Status.TRUNCATED if i == 3 else Sample.Status.COMPLETED,
        )
        for i, (n, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    c = converter(micro_batch_size=2, global_batch_size=4, grpo_std_normalization=True)
    shards = c.shards(samples)

    expected: dict[int, list[int]] = {0: [], 1: []}
    for step in ([0, 1, 2, 3], [4, 5, 6, 7]):  # a rollout per sample: four make a step
        for number, micro_batch in enumerate([step[:2], step[2:]]):
            expected[number % 2] += micro_batch
    assert len(shards) == 2
    for rank, shard in enumerate(shards):
        data = shard.to_rollout_data()
        mine = expected[rank]
        assert data["sample_indices"] == mine
        assert data["micro_batch_indices"] == [[0, 1], [2, 3]]
        assert data["num_microbatches"] == [1, 1]
        assert data["global_batch_sizes"] == [4, 4]
        for position, i in enumerate(mine):
            group = rewards[i // 4 * 4 : i // 4 * 4 + 4]
            relative = (rewards[i] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
            assert data["tokens"][position].tolist() == samples[i].tokens
            assert data["response_lengths"][position] == lengths[i]
            assert data["total_lengths"][position] == lengths[i] + 2
            assert data["loss_masks"][position].tolist() == samples[i].loss_mask
            assert data["rollout_log_probs"][position].tolist() == samples[i].rollout_log_probs
            assert data["truncated"][position] == int(i == 3)
            assert data["rewards"][position] == pytest.approx(relative, abs=1e-12)
            assert data["rollout_mask_sums"][position].item() == sum(samples[i].loss_mask)
        assert data["raw_reward"] == rewards
        assert data["local_raw_reward"] == [rewards[i] for i in mine]


@st.composite
def runs(draw):
    """Rollouts one after the other, each a list of executions, each a number of sibling samples."""
    step = draw(st.integers(2, 4))
    executions = st.lists(st.integers(1, 3), min_size=step, max_size=3 * step)
    return step, draw(st.lists(executions, min_size=1, max_size=5)), draw(st.integers(0, 4)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(run=runs(), dp_size=st.integers(1, 2))
def test_whatever_is_left_over_is_trained_later_once_and_in_order(run, dp_size):
    step, rollouts, restart_after, name_singles = run
    changes = {"global_batch_size": step, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 8}
    c = converter(dp_size=dp_size, **changes)
    expected_rewards: dict[int, float] = {}
    made: list[list[int]] = []  # executions in the order in which they were generated, by the indices of their samples
    trained_order: list[int] = []  # the numbers of executions
    index = 0
    for number, executions in enumerate(rollouts):
        samples: list[Sample] = []
        for execution, siblings in enumerate(executions):
            # Rollout ids start anew in every rollout; a lone sample may have none.
            rollout_id = execution if siblings > 1 or name_singles else None
            made.append(list(range(index, index + siblings)))
            for _ in range(siblings):
                samples.append(
                    Sample(
                        index=index,
                        group_index=number,
                        rollout_id=rollout_id,
                        tokens=[7, index],
                        response_length=1,
                        reward=float(index % 3),
                    )
                )
                index += 1
        mean = statistics.mean(s.reward for s in samples)
        flat = len({s.reward for s in samples}) == 1
        expected_rewards |= {s.index: 0.0 if flat else s.reward - mean for s in samples}

        shards = [shard.to_rollout_data() for shard in c.shards(samples)]
        seen: list[int] = [i for data in shards for i in data["sample_indices"]]
        assert len(set(seen)) == len(seen), "a sample was trained twice in one rollout"
        by_id: dict[int, set[int]] = {}
        for data in shards:
            rows = zip(data["sample_indices"], data["rollout_ids"], data["rewards"], data["tokens"], strict=True)
            for i, rollout_id, reward, tokens in rows:
                by_id.setdefault(rollout_id, set()).add(i)
                assert reward == pytest.approx(expected_rewards[i], abs=1e-12)
                assert tokens.tolist() == [7, i]
        # Siblings share an id, and nobody else has it: each id is exactly one execution.
        executions_trained = sorted(made.index(sorted(members)) for members in by_id.values())
        assert executions_trained == list(range(len(trained_order), len(trained_order) + len(by_id)))
        assert len(by_id) % step == 0
        assert shards[0]["global_batch_sizes"] == [step] * (len(by_id) // step)
        trained_order += executions_trained

        waiting = [s.index for s in c.carried.samples]
        assert waiting == [i for execution in made[len(trained_order) :] for i in execution]
        assert len(made) - len(trained_order) < step
        if number == restart_after:
            state = c.state()
            assert (state is None) == (not waiting)
            c = converter(dp_size=dp_size, **changes)
            c.restore(state)


def test_restored_samples_are_whole():
    c = converter()
    samples = rollout(0, [1, 0, 0, 0, 1, 0])
    samples[4].metadata = {"source_name": "sums", "深": [1, 2.5]}
    samples[4].response = "fünf"
    for s in samples:
        s.rollout_log_probs = [-0.1]
    c.shards(samples)
    resumed = converter()
    resumed.restore(c.state())
    assert [s.to_dict() for s in resumed.carried.samples] == [s.to_dict() for s in c.carried.samples]
    assert (resumed.carried.raw_rewards, resumed.carried.rewards) == ([1, 0], [0.5, -0.5])
    resumed.restore(None)  # a run that starts at a point where nothing waited
    assert resumed.carried.samples == []
    assert resumed.state() is None


def test_a_rollout_that_fills_no_step_is_refused_and_kept():
    c = converter()
    with pytest.raises(ScheduleError, match=r"3 rollouts .* --global-batch-size 4"):
        c.shards(rollout(0, [1, 0, 1], group_size=3))
    assert [s.index for s in c.carried.samples] == [0, 1, 2]


def test_what_a_converter_drops_cannot_be_carried_over_and_is_told(caplog):
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.doubling_converter", global_batch_size=4)
    with caplog.at_level(logging.WARNING):
        assert len(trained(c.shards(rollout(0, [1, 2, 3])))) == 4  # 6 rows, one step of 4
    assert c.carried.samples == []
    assert "2 of the 6 rows" in caplog.text


def doubling_converter(args, samples):
    """Returns two rows per sample."""
    data = bare_converter(args, [s for s in samples for _ in range(2)])
    return data | {"sample_indices": list(range(len(data["tokens"])))}


def test_the_file_of_what_waits_is_written_whole_or_not_at_all(tmp_path):
    path = carried_over_path(str(tmp_path), 3)
    assert path == tmp_path / "rollout" / "carried_over_3.json"
    write_carried_over(path, None)  # nothing there, nothing to write
    assert not path.exists()
    write_carried_over(path, b"{}")
    assert path.read_bytes() == b"{}"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
