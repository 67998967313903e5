"""The place of every process of a run, for every way to place one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slime.arguments.placement import EngineSizes
from slime.preflight.plan.placement import Placement, Router, placement_of
from tests.support.arguments import dry

TWO_MODELS = Path(__file__).parents[3] / "data" / "arguments" / "two_models.yaml"
TRAIN_4 = "--actor-num-nodes 2 --actor-num-gpus-per-node 2 --rollout-batch-size 8 --global-batch-size 8 "


def placed(flags: str) -> Placement:
    return placement_of(dry(*shlex.split(flags)))


def slots_by_process(placement: Placement) -> dict[str, list[int]]:
    """Process -> its slots."""
    found = {f"engine {e.rank}": list(placement.engine_slots(e)) for e in placement.engines}
    if placement.trainer is not None:
        found["trainer"] = list(range(placement.trainer.world_size))
    return found


@pytest.mark.parametrize(
    ("flags", "kind", "nodes", "processes"),
    [
        (TRAIN_4 + "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", "side by side", [8],
         {"trainer": [0, 1, 2, 3], "engine 0": [4, 5], "engine 1": [6, 7]}),
        (TRAIN_4 + "--rollout-num-gpus 6 --rollout-num-gpus-per-engine 2 --num-gpus-per-node 2", "side by side",
         [2] * 5, {"trainer": [0, 1, 2, 3], "engine 0": [4, 5], "engine 1": [6, 7], "engine 2": [8, 9]}),
        (TRAIN_4 + "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --num-gpus-per-node 2 --colocate",
         "colocated", [2, 2], {"trainer": [0, 1, 2, 3], "engine 0": [0, 1, 2, 3]}),
        (TRAIN_4 + "--debug-train-only", "training only", [4], {"trainer": [0, 1, 2, 3]}),
        ("--debug-rollout-only --rollout-num-gpus 3", "generation only", [3],
         {"engine 0": [0], "engine 1": [1], "engine 2": [2]}),
        (TRAIN_4 + "--rollout-num-gpus 0", "side by side", [4], {"trainer": [0, 1, 2, 3]}),
        ("--debug-rollout-only --rollout-num-gpus 0", "no slots", [], {}),
        (TRAIN_4 + "--rollout-external-engine-addrs 10.0.0.1:3000", "external engines", [4],
         {"trainer": [0, 1, 2, 3]}),
        ("--prefill-num-servers 1 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 2", "side by side", [7],
         {"trainer": [0], "engine 0": [1, 2], "engine 1": [3, 4], "engine 2": [5, 6]}),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4 --num-gpus-per-node 4", "side by side", [4, 4, 1],
         {"trainer": [0], "engine 0": [1, 2, 3, 4], "engine 1": [5, 6, 7, 8]}),
    ],
)  # fmt: skip
def test_slots_of_every_process(flags: str, kind: str, nodes: list[int], processes: dict[str, list[int]]) -> None:
    placement = placed(flags)
    assert placement.kind == kind
    assert [len(node.slots) for node in placement.nodes] == nodes
    assert slots_by_process(placement) == processes


def test_engines_of_a_deployment() -> None:
    placement = placed(f"--sglang-config {TWO_MODELS} --rollout-num-gpus 42 --actor-num-gpus-per-node 6 "
                       "--rollout-batch-size 6 --global-batch-size 6")  # fmt: skip
    assert [(e.model, e.worker_type, e.num_gpus, e.nodes) for e in placement.engines] == [
        ("actor", "prefill", 2, 1), *[("actor", "decode", 4, 1)] * 4, ("judge", "regular", 16, 2),
    ]  # fmt: skip
    assert [placement.engine_slots(e).start for e in placement.engines] == [6, 16, 20, 24, 28, 32]
    assert [placement.nodes_with(placement.engine_slots(e)) for e in placement.engines] == [
        range(1), range(2, 3), range(2, 3), range(3, 4), range(3, 4), range(4, 6),
    ]  # fmt: skip
    assert placement.engine_sizes[0] == EngineSizes(tp=2)
    assert placement.engine_sizes[1] == EngineSizes(tp=4, dp=4)
    assert placement.engine_sizes[5] == EngineSizes(tp=8, pp=2)
    assert placement.routers == (Router("actor", None), Router("judge", None))
    assert placement.idle == 8
    assert placement.split == ()


def test_routers() -> None:
    assert placed("").routers == (Router("default", None),)
    assert placed("--debug-train-only").routers == ()
    assert placed("--rollout-num-gpus 0").routers == (Router("default", None),)
    given = "--sglang-router-ip 10.0.0.5 --sglang-router-port 3000"
    assert placed(given).routers == (Router("default", "10.0.0.5:3000"),)
    both = placed(f"{given} --sglang-config {TWO_MODELS} --rollout-num-gpus 42")
    assert both.routers == (Router("actor", "10.0.0.5:3000"), Router("judge", None))


def test_a_critic_shares_the_slots_of_the_actor() -> None:
    assert not placed("").critic
    placement = placed("--advantage-estimator ppo")
    assert placement.critic
    assert placement.layout.slots == 2


def test_engines_started_elsewhere() -> None:
    addresses = ("10.0.0.1:3000", "10.0.0.2:3000")
    assert placed(f"--rollout-external-engine-addrs {' '.join(addresses)}").external == addresses
    assert placed("").external == ()


def test_the_sizes_of_engines() -> None:
    flags = "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 --sglang-pp-size 2 --sglang-dp-size 4"
    placement = placed(flags + " --sglang-enable-dp-attention --sglang-ep-size 4")
    assert placement.engine_sizes == (EngineSizes(tp=4, pp=2, dp=4, ep=4),)
