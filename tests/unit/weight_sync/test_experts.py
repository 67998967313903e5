"""An engine rank is handed the experts that it holds, and everything that is no routed expert."""

from __future__ import annotations

from typing import Any

import pytest

from slime.weight_sync.tensor import ExpertPlaces

EP2 = {"tp_size": 2, "ep_size": 2, "moe_dp_size": 1, "pp_size": 1, "init_expert_location": "trivial"}


def expert(number: int, part: str = "gate_proj.weight") -> str:
    return f"model.layers.1.mlp.experts.{number}.{part}"


def test_each_expert_has_one_rank_and_the_rest_is_everywhere() -> None:
    places = ExpertPlaces.of_engine(EP2, 8)
    assert places is not None
    for number in range(8):
        for part in ("gate_proj.weight", "down_proj.weight_packed"):
            assert [places.holds(rank, expert(number, part)) for rank in range(2)] == [number < 4, number >= 4]
    for name in (
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "lm_head.weight",
    ):
        assert places.holds(0, name)
        assert places.holds(1, name)


def test_blocks_of_ranks_with_all_experts() -> None:
    places = ExpertPlaces.of_engine({**EP2, "tp_size": 4, "moe_dp_size": 2}, 8)
    assert places is not None
    assert [rank for rank in range(4) if places.holds(rank, expert(5))] == [1, 3]


@pytest.mark.parametrize(
    "other",
    [{"ep_size": 1}, {"tp_size": 4}, {"enable_eplb": True}, {"ep_num_redundant_experts": 2}, {"pp_size": 2},
     {"init_expert_location": "/somewhere.pt"}],
)  # fmt: skip
def test_everything_goes_everywhere_otherwise(other: dict[str, Any]) -> None:
    assert ExpertPlaces.of_engine({**EP2, **other}, 8) is None


@pytest.mark.parametrize("number", [None, 7])
def test_a_number_of_experts_that_does_not_divide(number: int | None) -> None:
    assert ExpertPlaces.of_engine(EP2, number) is None
