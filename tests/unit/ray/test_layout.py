"""Who gets which slots."""

from __future__ import annotations

import pytest

from slime.ray.layout import EnginePlan, node_sort_key, plan_engines, plan_layout
from slime.ray.rollout_validation import validate_server_group_gpu_indices


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (6, 4)),
        ({"colocate": True}, (4, 0)),
        ({"train_only": True}, (4, 0)),
        ({"rollout_only": True}, (2, 0)),
        ({"external": True}, (4, 4)),
        ({"external": True, "rollout_only": True}, (4, 0)),
        ({"train_only": True, "colocate": True}, (4, 0)),
    ],
)
def test_reserved_slots_and_where_rollout_begins(options, expected):
    layout = plan_layout(actor_slots=4, rollout_slots=2, **options)
    assert (layout.slots, layout.rollout_offset) == expected


def test_colocated_engines_may_need_more_than_the_trainers():
    layout = plan_layout(actor_slots=2, rollout_slots=8, colocate=True)
    assert (layout.slots, layout.rollout_offset, layout.trainer_slots, layout.rollout_slots) == (8, 0, 2, 8)


def test_nothing_to_reserve():
    assert plan_layout(actor_slots=0, rollout_slots=0, rollout_only=True).slots == 0


def test_engines_within_a_node():
    assert plan_engines(rollout_slots=6, slots_per_engine=2, slots_per_node=8) == [
        EnginePlan(0, 0, 2, 2, 1),
        EnginePlan(1, 2, 2, 2, 1),
        EnginePlan(2, 4, 2, 2, 1),
    ]


def test_engines_over_nodes():
    assert plan_engines(rollout_slots=32, slots_per_engine=16, slots_per_node=8) == [
        EnginePlan(0, 0, 16, 8, 2),
        EnginePlan(1, 16, 16, 8, 2),
    ]


def test_no_engines():
    assert plan_engines(rollout_slots=0, slots_per_engine=4, slots_per_node=8) == []


def test_idle_slots_are_refused():
    with pytest.raises(ValueError, match=r"--rollout-num-gpus 5 is no multiple .* 1 slots would stay idle"):
        plan_engines(rollout_slots=5, slots_per_engine=2, slots_per_node=8)


def test_an_engine_must_fill_its_nodes():
    with pytest.raises(ValueError, match="must be a multiple"):
        plan_engines(rollout_slots=24, slots_per_engine=12, slots_per_node=8)


def test_nodes_are_ordered_by_number_not_by_text():
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1"]
    assert sorted(addresses, key=node_sort_key) == ["9.255.0.1", "10.0.0.9", "10.0.0.10"]


def test_names_that_do_not_resolve_are_ordered_by_their_characters():
    assert node_sort_key("no such host") == tuple(map(ord, "no such host"))


GROUP = {
    "worker_type": "regular",
    "gpu_offset": 2,
    "num_gpus_per_engine": 2,
    "num_gpus_per_engine_on_node": 2,
    "num_engines": 3,
    "num_available_gpus": 8,
    "rollout_num_gpus": 8,
    "rollout_num_gpus_per_engine": 2,
}


def test_a_group_that_fits_exactly():
    validate_server_group_gpu_indices(**GROUP)


@pytest.mark.parametrize(
    "wrong", [{"num_available_gpus": 7}, {"gpu_offset": -1}, {"num_gpus_per_engine_on_node": 0}, {"num_engines": 4}]
)
def test_a_group_that_does_not_fit_names_every_input(wrong):
    group = {**GROUP, **wrong}
    required = group["gpu_offset"] + group["num_engines"] * group["num_gpus_per_engine_on_node"]
    with pytest.raises(ValueError) as raised:
        validate_server_group_gpu_indices(**group)
    text = str(raised.value)
    assert all(f"{name}={value}" in text for name, value in group.items())
    assert f"required_gpu_slots={required}" in text
    assert f"len(reordered_gpu_ids)={group['num_available_gpus']}" in text


def test_a_group_without_engines_is_accepted():
    validate_server_group_gpu_indices(**{**GROUP, "num_engines": 0, "num_available_gpus": 0, "gpu_offset": -5})
