"""Samples become shards; what does not fill a training step is trained in the next one, once."""

from __future__ import annotations

import statistics
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.batching.errors import ScheduleError
from slime.ray.manager.conversion import Converter, carried_over_path, read_carried_over, write_carried_over
from slime.utils.types import Sample
from tests.support.arguments import run_args


def arguments(**changes):
    base = {"n_samples_per_prompt": 2, "rollout_batch_size": 3, "grpo_std_normalization": False}
    return run_args(**{**base, **changes})


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
        s.rollout_id = 2  # the id that was carried over, used again
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
    assert not path.exists()  # nothing was left over: a stale file must not be read again


def test_custom_reward_post_processing_and_conversion():
    c = converter(custom_reward_post_process_path=f"{__name__}.negated")
    assert trained(c.shards(rollout(0, [1, 0, 0, 0]))) == {0: -1.0, 1: 0.0, 2: 0.0, 3: 0.0}
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.bare_converter")
    assert sorted(trained(c.shards(rollout(0, [1, 2, 3, 4, 5, 6]))).values()) == [1.0, 2.0, 3.0, 4.0]
    assert c.carried.rows["sample_indices"] == [4, 5]
    assert sorted(trained(c.shards(rollout(6, [7, 8]))).values()) == [5.0, 6.0, 7.0, 8.0]
    assert not c.carried


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


def every_key(args, samples):
    """Returns the keys that training knows, some of its own, and derives rollout ids and mask sums from nothing."""
    return bare_converter(args, samples) | {
        "raw_reward": [10 * s.reward for s in samples],
        "truncated": [0 for _ in samples],
        "round_number": [2 for _ in samples],
        "rollout_log_probs": [[-0.5] for _ in samples],
        "teacher_log_probs": [[-0.25] for _ in samples],
        "rollout_top_p_token_ids": [[4, 5] for _ in samples],
        "rollout_top_p_token_offsets": [[0, 2] for _ in samples],
        "rollout_routed_experts": [np.full((2, 1, 2), s.index) for s in samples],
        "multimodal_train_inputs": [{"pixels": s.index} for s in samples],
        "metadata": [{"origin": s.index} for s in samples],
        "source_names": [f"source {s.index}" for s in samples],
        "prompt": [f"prompt {s.index}" for s in samples],
        "my_column": [{"anything": s.index} for s in samples],
        "my_numbers": np.array([0.5 * s.index for s in samples]),
        "absent": None,
    }


def test_every_key_of_a_converter_reaches_the_trainer_in_its_place():
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.every_key")
    shards = [shard.to_rollout_data() for shard in c.shards(rollout(0, [1, 2, 3, 4]))]
    known = every_key(None, rollout(0, [1, 2, 3, 4]))
    for data in shards:
        assert (set(known) | {"rollout_ids", "rollout_mask_sums", "total_lengths"}) - {"absent"} <= set(data)
        for position, index in enumerate(data["sample_indices"]):
            for key in ("multimodal_train_inputs", "metadata", "source_names", "prompt", "my_column", "round_number"):
                assert data[key][position] == known[key][index], key
            assert data["my_numbers"][position] == 0.5 * index
            assert data["local_raw_reward"][position] == 10 * (index + 1)
            assert data["rollout_routed_experts"][position].tolist() == [[[index, index]]] * 2
            for key in ("rollout_log_probs", "teacher_log_probs", "rollout_top_p_token_ids"):
                assert data[key][position].tolist() == known[key][index]
            assert data["total_lengths"][position] == 3
            assert data["rollout_mask_sums"][position] == 1.0  # of its own
        assert len(set(data["rollout_ids"])) == len(data["rollout_ids"])  # each a rollout of its own
        assert data["raw_reward"] == known["raw_reward"]


def test_metadata_for_the_trainer_arrives_without_a_converter_too():
    samples = rollout(0, [1, 0, 0, 0])
    samples[2].train_metadata = {"weight": 3}
    shards = [shard.to_rollout_data() for shard in converter().shards(samples)]
    found = {i: m for data in shards for i, m in zip(data["sample_indices"], data["metadata"], strict=True)}
    assert found == {0: None, 1: None, 2: {"weight": 3}, 3: None}


def notes_of(caught) -> str:
    return "\n".join(getattr(caught.value, "__notes__", ()))


def number_converter(args, samples):
    return 3


def lacking_converter(args, samples):
    return {key: values for key, values in bare_converter(args, samples).items() if key != "loss_masks"}


def long_masks(args, samples):
    return bare_converter(args, samples) | {"loss_masks": [[1, 1] for _ in samples]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number_converter", r"returned int 3; expected a dict of lists with one entry per sample"),
        ("lacking_converter", r"train data lacks loss_masks"),
        ("long_masks", r"sample index=0 .*loss_masks has 2 entries, expected 1"),
    ],
)
def test_what_a_converter_gets_wrong_names_it(name, message):
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.{name}")
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        c.shards(rollout(0, [1, 0, 0, 0]))
    reported = f"{caught.value}\n{notes_of(caught)}"
    assert f"--custom-convert-samples-to-train-data-path '{__name__}.{name}' ({__file__}:" in reported


def one_list(args, samples):
    return [0.0 for _ in samples]


def too_few(args, samples):
    return [0.0 for _ in samples], [0.0]


async def tensors(args, samples):
    return [s.reward for s in samples], torch.tensor([2.0 * s.reward for s in samples])


def nan_for_one(args, samples):
    return [0.0] * len(samples), [0.0, float("nan"), *[0.0] * (len(samples) - 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_list", r"returned list \[0.0, 0.0, 0.0, 0.0\]; expected two lists: \(raw_rewards, rewards\)"),
        ("too_few", r"returned as rewards 1 of them for 4 samples; expected one per sample, in order"),
        ("nan_for_one", r"sample index=1 .*reward nan is not a finite number"),
    ],
)
def test_what_a_reward_post_processing_gets_wrong_names_it(name, message):
    c = converter(custom_reward_post_process_path=f"{__name__}.{name}")
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        c.shards(rollout(0, [1, 0, 0, 0]))
    reported = f"{caught.value}\n{notes_of(caught)}"
    assert f"--custom-reward-post-process-path '{__name__}.{name}' ({__file__}:" in reported


def test_a_reward_post_processing_may_be_a_coroutine_function_and_return_tensors():
    c = converter(custom_reward_post_process_path=f"{__name__}.tensors")
    assert trained(c.shards(rollout(0, [1, 0, 3, 0]))) == {0: 2.0, 1: 0.0, 2: 6.0, 3: 0.0}


async def my_reward(args, sample, **kwargs):
    return None


def test_samples_that_cannot_be_right_name_the_hooks_that_made_them():
    samples = rollout(0, [1, 0, 0, 0])
    samples[2].reward = None
    generate = "slime.rollout.sglang_rollout.generate"
    c = converter(custom_rm_path=f"{__name__}.my_reward", custom_generate_function_path=generate)
    with pytest.raises(ValueError, match=r"sample index=2 .*reward None is not a finite number") as caught:
        c.shards(samples)
    place = f"({__file__}:{my_reward.__code__.co_firstlineno})"
    assert notes_of(caught) == f"the samples were made with --custom-rm-path '{__name__}.my_reward' {place}"
    samples = rollout(0, [1, 0, 0, 0])
    samples[3].loss_mask = [1, 1]
    with pytest.raises(ValueError, match=r"sample index=3 .*loss_masks has 2 entries, expected 1") as caught:
        c.shards(samples)
    assert "my_reward" in notes_of(caught)


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


@settings(max_examples=60, deadline=None)
@given(data=st.data(), divide=st.booleans())
def test_rewards_are_relative_to_the_prompt_whatever_became_of_its_siblings(data, divide):
    """Groups of unequal size, in any order, with siblings dropped: against the formula, group by group."""
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rewards = st.sampled_from([0.0, 0.25, 1.0])
    samples = [
        Sample(group_index=10 * group, tokens=[7, 8], response_length=1, reward=data.draw(rewards))
        for group, count in enumerate(counts)
        for _ in range(count)
    ]
    samples = data.draw(st.permutations(samples))
    for index, one in enumerate(samples):
        one.index = index
    # counts as --rollout-batch-size x --n-samples-per-prompt would have them must not matter
    shape = data.draw(st.sampled_from([(len(samples), 1), (1, len(samples)), (3, 2)]))
    c = converter(
        dp_size=1, global_batch_size=len(samples), grpo_std_normalization=divide,
        n_samples_per_prompt=shape[0], rollout_batch_size=shape[1],
    )  # fmt: skip
    found = trained(c.shards(samples))
    assert len(found) == len(samples)
    for one in samples:
        peers = [s.reward for s in samples if s.group_index == one.group_index]
        expected = 0.0
        if len(set(peers)) > 1:
            expected = one.reward - statistics.mean(peers)
            expected /= statistics.stdev(peers) + 1e-6 if divide else 1.0
        assert found[one.index] == pytest.approx(expected, abs=1e-12)


@st.composite
def runs(draw):
    """Rollouts one after the other, each a list of trajectories, each a number of sibling samples."""
    step = draw(st.integers(2, 4))
    trajectories = st.lists(st.integers(1, 3), min_size=step, max_size=3 * step)
    return step, draw(st.lists(trajectories, min_size=1, max_size=5)), draw(st.integers(0, 4)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(run=runs(), dp_size=st.integers(1, 2))
def test_whatever_is_left_over_is_trained_later_once_and_in_order(run, dp_size):
    step, rollouts, restart_after, name_singles = run
    changes = {"global_batch_size": step, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 8}
    c = converter(dp_size=dp_size, **changes)
    expected_rewards: dict[int, float] = {}
    made: list[list[int]] = []  # trajectories in the order of generation, by the indices of their samples
    trained_order: list[int] = []  # the numbers of trajectories
    index = 0
    for number, trajectories in enumerate(rollouts):
        samples: list[Sample] = []
        for trajectory, siblings in enumerate(trajectories):
            # Rollout ids start again in every rollout; a lone sample may have none.
            rollout_id = trajectory if siblings > 1 or name_singles else None
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
        of_trajectories = [[index % 3 for index in indices] for indices in made[-len(trajectories) :]]
        mean = statistics.mean(statistics.mean(rewards) for rewards in of_trajectories)
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
        # Siblings share an id, which no other sample has: each id is exactly one trajectory.
        trajectories_trained = sorted(made.index(sorted(members)) for members in by_id.values())
        assert trajectories_trained == list(range(len(trained_order), len(trained_order) + len(by_id)))
        assert len(by_id) % step == 0
        assert shards[0]["global_batch_sizes"] == [step] * (len(by_id) // step)
        trained_order += trajectories_trained

        waiting = [s.index for s in c.carried.samples]
        assert waiting == [i for trajectory in made[len(trained_order) :] for i in trajectory]
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
    with pytest.raises(ScheduleError, match=r"3 trajectories .* --global-batch-size 4"):
        c.shards(rollout(0, [1, 0, 1], group_size=3))
    assert [s.index for s in c.carried.samples] == [0, 1, 2]


def test_rows_of_a_converter_wait_however_many_it_makes_of_a_sample():
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.doubling_converter", global_batch_size=4)
    rewards = [list(trained(c.shards(rollout(n, [n, n + 1, n + 2]))).values()) for n in (1, 4)]
    assert sorted(rewards[0]) == [1, 1, 2, 2]  # 6 rows, one step of 4
    assert sorted(rewards[1]) == [3, 3, 4, 4, 5, 5, 6, 6]
    assert not c.carried


def doubling_converter(args, samples):
    """Returns two rows per sample."""
    data = bare_converter(args, [s for s in samples for _ in range(2)])
    return data | {"sample_indices": [1000 * samples[0].index + i for i in range(len(data["tokens"]))]}


def sorting_converter(args, samples):
    """Returns rows in another order than the samples, arrays and tensors among them, relative to their rollout."""
    data = every_key(args, sorted(samples, key=lambda s: -s.index))
    rewards = torch.tensor(data["rewards"])
    return data | {"rewards": rewards - rewards.mean(), "rollout_ids": [0, 0, 1, 1, 2, 2], "total_lengths": [3] * 6}


def test_a_converter_sees_each_sample_once_and_its_rows_stay_what_they_are(tmp_path):
    changes = {"custom_convert_samples_to_train_data_path": f"{__name__}.sorting_converter", "global_batch_size": 2}
    c, resumed = converter(dp_size=1, **changes), converter(dp_size=1, **changes)
    first = trained(c.shards(rollout(0, [1, 2, 3, 4, 5, 6])))
    assert first == {5: 2.5, 4: 1.5, 3: 0.5, 2: -0.5}
    resumed.restore(c.state())
    for one in (c, resumed):
        (shard,) = one.shards(rollout(10, [1, 2, 3, 4, 5, 6]))
        data = shard.to_rollout_data()
        assert data["sample_indices"] == [1, 0, 15, 14, 13, 12, 11, 10]
        assert data["rewards"] == [-1.5, -2.5, 2.5, 1.5, 0.5, -0.5, -1.5, -2.5]
        assert [data["rollout_ids"].count(i) for i in data["rollout_ids"]] == [2] * 8  # four trajectories of two
        assert data["global_batch_sizes"] == [2, 2]
        for position, index in enumerate(data["sample_indices"]):
            assert data["my_column"][position] == {"anything": index}
            assert data["my_numbers"][position] == 0.5 * index
            assert data["rollout_routed_experts"][position].tolist() == [[[index, index]]] * 2
        assert not one.carried


def fickle_converter(args, samples):
    """Returns a column of its own for some rollouts only."""
    return bare_converter(args, samples) | ({"extra": [0] * len(samples)} if samples[0].index else {})


def test_rows_that_wait_need_the_columns_of_those_they_join():
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.fickle_converter")
    c.shards(rollout(0, [1, 2, 3, 4, 5]))
    with pytest.raises(ValueError, match=r"\(4 rows\) and 1 rows that wait .* only one of them has extra") as caught:
        c.shards(rollout(10, [1, 2, 3, 4]))
    assert "fickle_converter" in notes_of(caught)


def test_what_waits_is_not_restored_into_another_conversion():
    path = f"{__name__}.bare_converter"
    with_one, without = converter(custom_convert_samples_to_train_data_path=path), converter()
    for c in (with_one, without):
        c.shards(rollout(0, [1, 0, 0, 0, 1]))
    with pytest.raises(ValueError, match=r"1 samples that wait .* were saved without --custom-convert"):
        converter(custom_convert_samples_to_train_data_path=path).restore(without.state())
    with pytest.raises(ValueError, match=r"1 samples that wait .* were saved with --custom-convert"):
        converter().restore(with_one.state())


def test_samples_that_wait_are_copies_and_their_ids_are_unique():
    """As for a rollout function that returns the same objects every time, with ids of its own below zero."""
    c = converter(dp_size=1)
    samples = rollout(0, [1, 0, 1, 0, 1, 0])
    for s, rollout_id in zip(samples, [-1, -2, -3, -4, -5, -6], strict=True):
        s.rollout_id = rollout_id
    for trained_steps in (1, 2):  # 4 of 6, then 2 and 6
        (shard,) = c.shards(samples)
        data = shard.to_rollout_data()
        assert len(set(data["rollout_ids"])) == len(data["rollout_ids"]) == 4 * trained_steps
        assert data["rollout_mask_sums"].tolist() == [1.0] * 4 * trained_steps
    assert [s.rollout_id for s in samples] == [-1, -2, -3, -4, -5, -6]


def test_the_file_of_what_waits_is_written_whole_or_not_at_all(tmp_path):
    path = carried_over_path(str(tmp_path), 3)
    assert path == tmp_path / "rollout" / "carried_over_3.json"
    write_carried_over(path, None)  # nothing there, nothing to write
    assert not path.exists()
    write_carried_over(path, b"{}")
    assert read_carried_over(path) == b"{}"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_id_that_is_no_number_is_named_also_where_samples_wait():
    c = converter()
    c.shards(rollout(0, [1, 0, 1, 0, 1]))
    samples = rollout(10, [1, 0, 1, 0])
    samples[1].rollout_id = "second"
    with pytest.raises(ValueError, match="rollout_id 'second' is no whole number"):
        c.shards(samples)


def test_objects_that_only_some_rollouts_have_are_filled_up_and_rows_are_copies():
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.with_notes", dp_size=1, global_batch_size=3)
    samples = rollout(0, [1, 2, 3, 4])
    c.shards(samples)
    samples[3].tokens[0] = 99
    (shard,) = c.shards(rollout(10, [1, 2]))
    data = shard.to_rollout_data()
    assert data["sample_indices"] == [3, 10, 11]
    assert data["metadata"] == [None, {"note": 10}, {"note": 11}]
    assert data["tokens"][0].tolist() == [7, 3, 9]


def with_notes(args, samples):
    notes = [{"note": s.index} for s in samples] if samples[0].index else None
    return bare_converter(args, samples) | {"metadata": notes}


def with_locks(args, samples):
    return bare_converter(args, samples) | {"metadata": [threading.Lock() for _ in samples]}


def test_rows_that_cannot_be_saved_name_column_and_converter():
    c = converter(custom_convert_samples_to_train_data_path=f"{__name__}.with_locks")
    c.shards(rollout(0, [1, 2, 3, 4, 5]))
    with pytest.raises(TypeError, match=r"'metadata' of rows that wait .* made with --custom-convert.*with_locks"):
        c.state()
