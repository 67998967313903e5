"""Who gets which slots: the table of cases, the engines on them, the order of nodes."""

from __future__ import annotations

import itertools
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.layout import EnginePlan, Layout, layout_of, node_sort_key, plan_engines, plan_layout

A, R = 6, 4


@pytest.mark.parametrize(
    ("mode", "slots", "offset"),
    [
        ({}, A + R, A),
        ({"colocate": True}, 6, 0),
        ({"train_only": True}, A, 0),
        ({"rollout_only": True}, R, 0),
        ({"external": True}, A, A),
        ({"external": True, "rollout_only": True}, A, 0),
        ({"external": True, "train_only": True}, A, 0),
        ({"colocate": True, "train_only": True}, A, 0),
        ({"colocate": True, "rollout_only": True}, R, 0),
    ],
)
def test_slots_and_where_the_rollouts_begin(mode: dict[str, bool], slots: int, offset: int) -> None:
    layout = plan_layout(actor_slots=A, rollout_slots=R, **mode)
    assert (layout.slots, layout.rollout_offset) == (slots, offset)


def test_colocated_engines_may_outnumber_trainers() -> None:
    assert plan_layout(actor_slots=2, rollout_slots=8, colocate=True) == Layout(8, 0, 2, 8)


def flags(**overrides: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 3,
        "rollout_num_gpus": 4,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rollout_external": False,
    }
    return SimpleNamespace(**{**values, **overrides})


def test_the_flags_lead_to_the_layout() -> None:
    assert layout_of(flags()) == Layout(10, 6, 6, 4)
    assert layout_of(flags(debug_train_only=True, rollout_num_gpus=None)) == Layout(6, 0, 6, 0)
    assert layout_of(flags(debug_rollout_only=True, actor_num_nodes=0)) == Layout(4, 0, 0, 4)
    assert layout_of(flags(rollout_external=True)) == Layout(6, 6, 6, 0)
    assert layout_of(flags(colocate=True)) == Layout(6, 0, 6, 4)


def test_engines_of_part_of_a_node() -> None:
    assert plan_engines(rollout_slots=6, slots_per_engine=2, slots_per_node=8) == [
        EnginePlan(rank=0, gpu_offset=0, num_gpus=2, num_gpus_on_node=2, nodes=1),
        EnginePlan(rank=1, gpu_offset=2, num_gpus=2, num_gpus_on_node=2, nodes=1),
        EnginePlan(rank=2, gpu_offset=4, num_gpus=2, num_gpus_on_node=2, nodes=1),
    ]


def test_engines_of_several_nodes() -> None:
    assert plan_engines(rollout_slots=32, slots_per_engine=16, slots_per_node=8) == [
        EnginePlan(rank=0, gpu_offset=0, num_gpus=16, num_gpus_on_node=8, nodes=2),
        EnginePlan(rank=1, gpu_offset=16, num_gpus=16, num_gpus_on_node=8, nodes=2),
    ]


def test_no_slots_no_engines() -> None:
    assert plan_engines(rollout_slots=0, slots_per_engine=4, slots_per_node=8) == []


def test_whatever_is_planned_covers_the_slots_once() -> None:
    for engines, per_engine, per_node in itertools.product(range(5), (1, 2, 4, 8, 16), (4, 8)):
        plans = plan_engines(rollout_slots=engines * per_engine, slots_per_engine=per_engine, slots_per_node=per_node)
        taken = [
            plan.gpu_offset + node * plan.num_gpus_on_node + i
            for plan in plans
            for node in range(plan.nodes)
            for i in range(plan.num_gpus_on_node)
        ]
        assert taken == list(range(engines * per_engine))


def test_slots_that_would_stay_idle_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--rollout-num-gpus 7 .*--rollout-num-gpus-per-engine 2: 1 slots would"):
        plan_engines(rollout_slots=7, slots_per_engine=2, slots_per_node=8)


@pytest.mark.parametrize("per_engine", [9, 12, 20])
def test_an_engine_beyond_a_node_must_fill_nodes(per_engine: int) -> None:
    with pytest.raises(ValueError, match=rf"per-engine {per_engine} slots .*--num-gpus-per-node 8"):
        plan_engines(rollout_slots=per_engine, slots_per_engine=per_engine, slots_per_node=8)


def test_nodes_are_ordered_by_number_not_by_text() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1", "10.0.0.100"]
    assert sorted(addresses, key=node_sort_key) == ["9.255.0.1", "10.0.0.9", "10.0.0.10", "10.0.0.100"]


def test_names_are_resolved_and_else_ordered_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str) -> str:
        if name == "b-node":
            return "10.0.0.2"
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    assert node_sort_key("b-node") == node_sort_key("10.0.0.2") == (10, 0, 0, 2)
    assert node_sort_key("nowhere") == tuple(ord(c) for c in "nowhere")
    assert sorted(["zz", "aa"], key=node_sort_key) == ["aa", "zz"]
