"""Assignment of slots: the table of cases, the engines on them."""

from __future__ import annotations

import itertools
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.arguments.placement import (
    EnginePlan,
    Layout,
    engines_of,
    engines_split_across_nodes,
    layout_of,
    node_of_slot,
    pack,
    plan_engines,
    plan_groups,
    plan_layout,
)
from tests.support.arguments import run_args

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


def flags(**overrides: Any) -> Namespace:
    values: dict[str, Any] = {
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 3,
        "rollout_num_gpus": 4,
        "rollout_num_gpus_per_engine": 2,
        "num_gpus_per_node": 8,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rollout_external": False,
    }
    return run_args(**{**values, **overrides})


def test_the_flags_lead_to_the_layout() -> None:
    assert layout_of(flags()) == Layout(10, 6, 6, 4)
    assert layout_of(flags(debug_train_only=True, rollout_num_gpus=None)) == Layout(6, 0, 6, 0)
    assert layout_of(flags(debug_rollout_only=True, actor_num_nodes=0)) == Layout(4, 0, 0, 4)
    assert layout_of(flags(rollout_external=True)) == Layout(6, 6, 6, 0)
    assert layout_of(flags(colocate=True)) == Layout(6, 0, 6, 4)


def test_the_flags_lead_to_the_engines() -> None:
    assert engines_of(flags()) == [EnginePlan(0, 0, 2, 2, 1), EnginePlan(1, 2, 2, 2, 1)]
    assert engines_of(flags(debug_train_only=True)) == []
    assert engines_of(flags(rollout_external=True)) == []
    assert engines_of(flags(rollout_num_gpus=0)) == []


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


def group(kind: str, num_gpus: int, num_gpus_per_engine: int | None) -> SimpleNamespace:
    return SimpleNamespace(worker_type=kind, num_gpus=num_gpus, num_gpus_per_engine=num_gpus_per_engine, overrides={})


def test_groups_of_several_models_follow_each_other() -> None:
    models = [
        SimpleNamespace(
            name="actor", server_groups=[group("prefill", 4, 4), group("placeholder", 3, None), group("decode", 4, 2)]
        ),
        SimpleNamespace(name="judge", server_groups=[group("regular", 16, 16)]),
    ]
    assert plan_groups(models, slots_per_node=8) == [
        EnginePlan(0, 0, 4, 4, 1, "prefill", "actor", 0),
        EnginePlan(1, 7, 2, 2, 1, "decode", "actor", 2),
        EnginePlan(2, 9, 2, 2, 1, "decode", "actor", 2),
        EnginePlan(3, 11, 16, 8, 2, "regular", "judge", 3),
    ]


def test_a_group_of_part_of_an_engine_is_named() -> None:
    models = [SimpleNamespace(name="judge", server_groups=[group("decode", 6, 4)])]
    with pytest.raises(ValueError, match=r"model judge, decode engines: .* 2 slots would stay idle"):
        plan_groups(models, slots_per_node=8)


@st.composite
def deployments(draw: st.DrawFn) -> tuple[list[SimpleNamespace], int]:
    """Models, and slots per node."""
    slots_per_node = draw(st.sampled_from([1, 2, 4, 8]))
    models = []
    for name in range(draw(st.integers(1, 3))):
        groups = []
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(["regular", "prefill", "decode", "encoder", "placeholder"]))
            size = draw(st.sampled_from([1, 2, slots_per_node, 2 * slots_per_node, 3 * slots_per_node]))
            if size > slots_per_node and size % slots_per_node:
                size = slots_per_node
            groups.append(group(kind, size * draw(st.integers(1, 4)), size))
        models.append(SimpleNamespace(name=str(name), server_groups=groups))
    return models, slots_per_node


@given(deployments())
def test_engines_fill_the_slots_of_their_groups(case: tuple[list[SimpleNamespace], int]) -> None:
    models, slots_per_node = case
    engines = plan_groups(models, slots_per_node=slots_per_node)
    owner = [
        (model.name, group.worker_type, number)
        for number, (model, group) in enumerate((m, g) for m in models for g in m.server_groups)
        for _ in range(group.num_gpus)
    ]
    taken: dict[int, tuple[str, str, int]] = {}
    for engine in engines:
        own = [slot for part in engine.parts() for slot in part]
        assert own == list(range(engine.gpu_offset, engine.gpu_offset + engine.num_gpus))
        assert len(engine.parts()) == engine.nodes
        assert not taken.keys() & own
        taken |= dict.fromkeys(own, (engine.model, engine.worker_type, engine.group))
    assert taken == {slot: who for slot, who in enumerate(owner) if who[1] != "placeholder"}
    assert [engine.rank for engine in engines] == list(range(len(engines)))


layouts = st.builds(
    plan_layout,
    actor_slots=st.integers(0, 70),
    rollout_slots=st.integers(0, 70),
    colocate=st.booleans(),
    train_only=st.booleans(),
    rollout_only=st.booleans(),
    external=st.booleans(),
)


@given(layouts, st.integers(1, 9), st.integers(1, 9))
def test_nodes_are_filled_one_after_the_other(layout: Layout, per_trainer_node: int, per_node: int) -> None:
    nodes = pack(layout, trainer_slots_per_node=per_trainer_node, slots_per_node=per_node)
    assert [slot for node in nodes for slot in node.slots] == list(range(layout.slots))
    assert [node.index for node in nodes] == list(range(len(nodes)))
    assert all(len(node.slots) == node.capacity for node in nodes[:-1])
    assert all(0 < len(node.slots) <= node.capacity for node in nodes)
    for node in nodes:
        larger = node.slots[0] < layout.trainer_slots and per_trainer_node > per_node
        assert node.capacity == (per_trainer_node if larger else per_node)


@given(st.integers(0, 5), st.integers(1, 4), st.sampled_from([1, 2, 4, 8, 16, 24]))
def test_engines_that_begin_with_a_node_lie_on_whole_nodes(before: int, count: int, size: int) -> None:
    layout = plan_layout(actor_slots=8 * before, rollout_slots=count * size)
    nodes = pack(layout, trainer_slots_per_node=8, slots_per_node=8)
    engines = plan_engines(rollout_slots=count * size, slots_per_engine=size, slots_per_node=8)
    assert engines_split_across_nodes(engines, node_of_slot(nodes), layout.rollout_offset) == []
    node = node_of_slot(nodes)
    for engine in engines:
        used = [node[layout.rollout_offset + engine.gpu_offset + i] for i in range(engine.num_gpus)]
        assert all(used.count(index) == min(size, 8) for index in set(used))


def test_engines_across_the_border_of_nodes_are_found() -> None:
    layout = plan_layout(actor_slots=3, rollout_slots=12)  # nodes: slots 0-7 and 8-14; engines: 3-6, 7-10, 11-14
    nodes = pack(layout, trainer_slots_per_node=3, slots_per_node=8)
    engines = plan_engines(rollout_slots=12, slots_per_engine=4, slots_per_node=8)
    assert [
        engine.rank for engine in engines_split_across_nodes(engines, node_of_slot(nodes), layout.rollout_offset)
    ] == [1]
    two_nodes = plan_engines(rollout_slots=16, slots_per_engine=16, slots_per_node=8)
    layout = plan_layout(actor_slots=3, rollout_slots=16)
    nodes = pack(layout, trainer_slots_per_node=3, slots_per_node=8)
    assert engines_split_across_nodes(two_nodes, node_of_slot(nodes), layout.rollout_offset) == two_nodes
