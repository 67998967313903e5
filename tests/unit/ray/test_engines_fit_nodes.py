"""Engines whose processes would need GPUs of two nodes are refused before they start."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.arguments import ArgumentError
from slime.arguments.placement import plan_engines
from slime.arguments.rules.weight_sync import check_engine_stages
from slime.ray.driver.placement_group import PlacementError, check_engines_fit_nodes, check_gpus_follow_each_other
from tests.support.arguments import dry

NODES = ["10.0.0.1"] * 8 + ["10.0.0.2"] * 8


def test_engines_within_a_node_are_accepted() -> None:
    engines = plan_engines(rollout_slots=12, slots_per_engine=4, slots_per_node=8)
    check_engines_fit_nodes(engines, NODES, 4)
    check_engines_fit_nodes(plan_engines(rollout_slots=16, slots_per_engine=16, slots_per_node=8), NODES, 0)


def test_an_engine_across_two_nodes_is_named() -> None:
    engines = plan_engines(rollout_slots=12, slots_per_engine=4, slots_per_node=8)
    with pytest.raises(PlacementError, match=r"engine 1 would get its 4 slots on 10\.0\.0\.1 and 10\.0\.0\.2, "):
        check_engines_fit_nodes(engines, NODES, 3)


def test_slots_of_a_node_of_another_size_are_no_node_of_an_engine() -> None:
    """--num-gpus-per-node 8 on machines of 4: the halves of an engine of 16 would each lie on two machines."""
    engines = plan_engines(rollout_slots=16, slots_per_engine=16, slots_per_node=8)
    with pytest.raises(PlacementError, match=r"engine 0 .* \(8\) must be on one node\. Change"):
        check_engines_fit_nodes(engines, [f"10.0.0.{slot // 4}" for slot in range(16)], 0)


def test_engines_on_gpus_that_follow_each_other_are_accepted() -> None:
    on_two_nodes = [0, 1, 2, 3, 0, 1, 2, 3]
    check_gpus_follow_each_other(plan_engines(rollout_slots=4, slots_per_engine=2, slots_per_node=8), on_two_nodes, 2)
    check_gpus_follow_each_other(plan_engines(rollout_slots=8, slots_per_engine=8, slots_per_node=4), on_two_nodes, 0)
    singles = plan_engines(rollout_slots=3, slots_per_engine=1, slots_per_node=8)
    check_gpus_follow_each_other(singles, [0, 2, 5], 0)
    check_gpus_follow_each_other(plan_engines(rollout_slots=2, slots_per_engine=2, slots_per_node=8), [0, 2, 3], 1)


def test_an_engine_around_the_gpu_of_another_program_is_named() -> None:
    engines = plan_engines(rollout_slots=4, slots_per_engine=2, slots_per_node=8)
    with pytest.raises(PlacementError, match=r"engine 1 would get GPUs 3, 5 of a node.*--rollout-num-gpus-per-engine"):
        check_gpus_follow_each_other(engines, [0, 1, 2, 3, 5], 1)


def test_engines_with_pipeline_stages_take_weights_from_files_only(tmp_path: Path) -> None:
    """SGLang's rank in the group of a weight update, and among the handles of shared memory, is that within a stage."""
    stages = ("--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 4, "--sglang-pp-size", 2)
    for place in ((), ("--colocate", "--actor-num-gpus-per-node", 4)):
        with pytest.raises(ArgumentError, match=r"--sglang-pp-size 2: .*--update-weight-transport disk"):
            check_engine_stages(dry(*stages, *place))
    check_engine_stages(dry(*stages, "--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path))
    check_engine_stages(dry(*stages, "--debug-rollout-only"))  # no weights are sent
    check_engine_stages(dry(*stages[:4]))
