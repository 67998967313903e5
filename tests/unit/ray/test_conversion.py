"""Samples become shards; what does not fill a training step is trained in the next one, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
