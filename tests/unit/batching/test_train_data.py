"""Samples -> train data: the keys, what fills gaps, and errors that name the sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.batching.columns import RolloutColumns
from slime.batching.errors import TrainDataError
from slime.batching.train_data import build_train_data
from slime.utils.types import Sample
from tests.support.arguments import run_args

ARGS = run_args(reward_key=None)


def make_sample(index: int = 0, response: int = 3, **fields: Any) -> Sample:
    return Sample(
        index=index,
        group_index=index // 2,
        tokens=list(range(1, 3 + response)),
        response_length=response,
        status=Sample.Status.COMPLETED,
        **fields,
    )


def build(samples: list[Sample], args: Any = ARGS, rewards: list[Any] | None = None) -> dict[str, Any]:
    rewards = [1.0] * len(samples) if rewards is None else rewards
    return build_train_data(args, samples, rewards, rewards)


def test_the_keys_every_converter_has() -> None:
    samples = [
        make_sample(4, 3, loss_mask=[1, 0, 1], rollout_id=9),
        make_sample(5, 2, rollout_id=9, remove_sample=True),
        make_sample(6, 1),
    ]
    samples[2].status = Sample.Status.TRUNCATED
    data = build_train_data(ARGS, samples, [1, 0, 2], [0.5, -0.5, 0.0])
    assert data["tokens"] == [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3]]
    assert data["response_lengths"] == [3, 2, 1]
    assert data["rewards"] == [0.5, -0.5, 0.0]
    assert data["raw_reward"] == [1, 0, 2]
    assert data["truncated"] == [0, 0, 1]
    assert data["sample_indices"] == [4, 5, 6]
    assert data["loss_masks"] == [[1, 0, 1], [0, 0], [1]]
    assert data["rollout_ids"] == [9, 9, None]
    assert data["rollout_mask_sums"] == [2.0, 2.0, 1.0]  # of the whole rollout
    assert "rollout_log_probs" not in data
    assert RolloutColumns.from_train_data(data).rollout_ids == [9, 9, 0]


def test_groups_are_passed_to_rloo_for_its_kl_penalty() -> None:
    samples = [make_sample(4), make_sample(5), make_sample(6)]
    for kl_coef, expected in ((0.0, None), (0.1, [2, 2, 3])):
        args = run_args(reward_key=None, advantage_estimator="rloo", kl_coef=kl_coef)
        assert build(samples, args).get("group_indices") == expected


def test_optional_fields_appear_when_a_sample_has_them() -> None:
    samples = [
        make_sample(0, rollout_log_probs=[-0.1] * 3, train_metadata={"a": 1}, metadata={"round_number": 2}),
        make_sample(1, rollout_log_probs=[-0.2] * 3, multimodal_train_inputs={"x": 1}, metadata={"source_name": "web"}),
    ]
    data = build(samples)
    assert data["rollout_log_probs"] == [[-0.1] * 3, [-0.2] * 3]
    assert data["metadata"] == [{"a": 1}, None]
    assert data["multimodal_train_inputs"] == [None, {"x": 1}]
    assert data["round_number"] == [2, None]
    assert data["source_names"] == ["unknown", "web"]


def test_own_source_attribute_wins() -> None:
    sample = make_sample(metadata={"source_name": "web"})
    sample.source = "mine"
    assert build([sample])["source_names"] == ["mine"]


def test_raw_reward_from_metadata_overrides_for_all() -> None:
    samples = [make_sample(0, reward=0.25, metadata={"raw_reward": 7}), make_sample(1, reward=0.5)]
    assert build_train_data(ARGS, samples, [1, 2], [0.0, 0.0])["raw_reward"] == [7, 0.5]


def test_log_probs_may_be_missing_where_nothing_is_trained() -> None:
    samples = [
        make_sample(0, rollout_log_probs=[-1.0] * 3),
        make_sample(1, remove_sample=True),
        make_sample(2, loss_mask=[0, 0, 0]),
        make_sample(3, response=0),
        make_sample(4, loss_mask=torch.zeros(3, dtype=torch.int32)),
    ]
    assert build(samples)["rollout_log_probs"] == [[-1.0] * 3, [0.0] * 3, [0.0] * 3, [], [0.0] * 3]


def test_top_p_masks_are_checked() -> None:
    args = run_args(reward_key=None, rollout_top_p=0.9)
    good = make_sample(0, 2, rollout_top_p_token_ids=[1, 2, 3], rollout_top_p_token_offsets=[0, 1, 3])
    data = build([good], args)
    assert data["rollout_top_p_token_offsets"] == [[0, 1, 3]]
    assert "rollout_top_p_token_ids" not in build([good])
    with pytest.raises(TrainDataError, match=r"index=1 .* no rollout_top_p_token_ids.*slime_return_sampling_mask"):
        build([good, make_sample(1)], args)
    good.rollout_top_p_token_offsets = [0, 1, 2]
    with pytest.raises(TrainDataError, match=r"index=0 .* must rise from 0 to 3, .*; they go from 0 to 2"):
        RolloutColumns.from_train_data(build([good], args))
    good.rollout_top_p_token_offsets = [0, 3]
    with pytest.raises(TrainDataError, match=r"index=0 .*offsets has 2 entries, expected 3"):
        RolloutColumns.from_train_data(build([good], args))


def r3_args(**flags: Any) -> SimpleNamespace:
    defaults = {"reward_key": None, "use_rollout_routing_replay": True, "num_layers": 3, "moe_router_topk": 2}
    return run_args(**{**defaults, **flags})


def test_routed_experts_are_checked() -> None:
    experts = torch.ones(4, 3, 2, dtype=torch.int32)
    data = build([make_sample(rollout_routed_experts=experts)], r3_args())
    assert np.array_equal(data["rollout_routed_experts"][0], experts)
    for count, dtype in ((256, np.uint8), (257, np.int16)):
        data = build([make_sample(rollout_routed_experts=experts * 255)], r3_args(num_experts=count))
        assert data["rollout_routed_experts"][0].dtype == dtype
        assert (data["rollout_routed_experts"][0] == 255).all()
    with pytest.raises(TrainDataError, match=r"^Invalid rollout routed-experts shape \(4, 2, 2\) of sample index=0"):
        build([make_sample(rollout_routed_experts=experts[:, :2])], r3_args())
    silent = experts.clone()
    silent[:, 1] = 0
    with pytest.raises(TrainDataError, match=r"all zero in MoE layers \[1\]"):
        build([make_sample(rollout_routed_experts=silent)], r3_args())
    with pytest.raises(TrainDataError, match=r"lie between 5 and 5, but the model has 4 experts"):
        build([make_sample(rollout_routed_experts=torch.where(experts > 0, 5, 0))], r3_args(num_experts=4))
    build([make_sample(rollout_routed_experts=silent)], r3_args(moe_layer_freq=[1, 0, 1]))  # layer 1 is dense
    build([make_sample(rollout_routed_experts=silent[..., :1])], r3_args(moe_router_topk=1))  # expert 0 throughout
    with pytest.raises(TrainDataError, match=r"Invalid rollout routed-experts shape None of sample index=1"):
        build([make_sample(rollout_routed_experts=experts), make_sample(1)], r3_args())


def test_tokens_whose_experts_were_not_recorded_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    experts = torch.ones(4, 3, 2, dtype=torch.int32)
    some = experts.clone()
    some[1:3, 2] = 0
    build([make_sample(rollout_routed_experts=experts)], r3_args())
    build([make_sample(rollout_routed_experts=some)], r3_args(moe_layer_freq=[1, 1, 0]))  # layer 2 is dense
    assert not caplog.records
    build([make_sample(rollout_routed_experts=experts), make_sample(1, rollout_routed_experts=some)], r3_args())
    assert "2 of 8 tokens (the first in sample index=1" in caplog.text


@pytest.mark.parametrize(
    ("fields", "reward", "match"),
    [
        ({"loss_mask": [1, 1]}, 1.0, "index=1 .* loss_masks has 2 entries, expected 3"),
        ({"rollout_log_probs": [-1.0] * 2}, 1.0, "index=1 .* rollout_log_probs has 2 entries, expected 3"),
        ({"rollout_log_probs": None}, 1.0, "index=1 .* has no rollout_log_probs while other samples"),
        ({}, float("nan"), "index=1 .* reward nan is not a finite number"),
        ({}, None, r"index=1 .* reward None is not a finite number \(status completed\)"),
        ({}, {"score": 1}, "--reward-key"),
    ],
)
def test_errors_name_the_sample(fields: dict[str, Any], reward: Any, match: str) -> None:
    first = make_sample(0, rollout_log_probs=[-1.0] * 3)
    second = make_sample(1, **{"rollout_log_probs": [-1.0] * 3, **fields})
    with pytest.raises(TrainDataError, match=match) as caught:
        RolloutColumns.from_train_data(build([first, second], rewards=[0.0, reward]))
    assert isinstance(caught.value, AssertionError)


def test_response_without_prompt_is_refused() -> None:
    sample = make_sample(8)
    sample.response_length = len(sample.tokens)
    with pytest.raises(TrainDataError, match=r"index=8 .* response length 5 with 5 tokens"):
        RolloutColumns.from_train_data(build([sample]))


def test_counts_must_agree_and_not_be_zero() -> None:
    with pytest.raises(TrainDataError, match="1 samples but 2 rewards"):
        build_train_data(ARGS, [make_sample()], [1.0], [1.0, 2.0])
    with pytest.raises(TrainDataError, match="no sample"):
        build([])


@pytest.mark.parametrize(
    "reward", [np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), torch.tensor(1)], ids=repr
)
def test_raw_rewards_of_numpy_and_torch_become_plain_numbers(reward: Any) -> None:
    samples = [make_sample(0, reward=reward), make_sample(1, metadata={"raw_reward": reward})]
    for some in (samples[:1], samples[1:]):
        (raw,) = build_train_data(ARGS, some, [reward], [0.0])["raw_reward"]
        assert type(raw) in (int, float)
        assert raw == 1


def test_a_rollout_id_that_is_no_number_is_named() -> None:
    samples = [make_sample(0), make_sample(1, rollout_id="a conversation")]
    with pytest.raises(TrainDataError, match="sample at position 1: rollout_id 'a conversation' is no whole number"):
        RolloutColumns.from_train_data(build(samples))
