"""A server group must fit into the slots, and the refusal says everything it was based on."""

from __future__ import annotations

from typing import Any

import pytest

from slime.ray.manager.engines.slots import validate_server_group_gpu_indices

GROUP: dict[str, Any] = {
    "worker_type": "prefill",
    "gpu_offset": 4,
    "num_gpus_per_engine": 16,
    "num_gpus_per_engine_on_node": 8,
    "num_engines": 3,
    "num_available_gpus": 28,
    "rollout_num_gpus": 24,
    "rollout_num_gpus_per_engine": 16,
}


def test_a_group_that_just_fits_is_accepted() -> None:
    validate_server_group_gpu_indices(**GROUP)  # 4 + 3 * 8 == 28


def test_no_engines_are_accepted_whatever_the_rest() -> None:
    group = GROUP | {"num_engines": 0, "gpu_offset": -1, "num_gpus_per_engine_on_node": 0, "num_available_gpus": 0}
    validate_server_group_gpu_indices(**group)


@pytest.mark.parametrize(
    ("change", "required"),
    [
        ({"num_available_gpus": 27}, 28),
        ({"gpu_offset": 5}, 29),
        ({"num_engines": 4}, 36),
        ({"gpu_offset": -1}, 23),
        ({"num_gpus_per_engine_on_node": 0}, 4),
        ({"num_gpus_per_engine_on_node": -8}, -20),
    ],
)
def test_the_refusal_carries_every_input(change: dict[str, Any], required: int) -> None:
    group = GROUP | change
    with pytest.raises(ValueError) as refused:
        validate_server_group_gpu_indices(**group)
    text = str(refused.value)
    for name, value in group.items():
        assert f"{name}={value}," in text or f"{name}={value}." in text
    assert f"required_gpu_slots={required}," in text
    assert f"len(reordered_gpu_ids)={group['num_available_gpus']}," in text


def test_a_number_of_rollout_slots_that_is_not_known_is_reported_too() -> None:
    with pytest.raises(ValueError, match="rollout_num_gpus=None"):
        validate_server_group_gpu_indices(**GROUP | {"rollout_num_gpus": None, "num_available_gpus": 0})
