"""Coordinates of trainer ranks: nested loops, and Megatron's own generator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils import import_megatron
from slime.preflight.plan.placement import TrainerRanks, ranks_of


@st.composite
def rank_sizes(draw: st.DrawFn) -> TrainerRanks:
    tp, cp, dp, pp = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([d for d in range(1, 5) if stage % d == 0]))
    ep = draw(st.sampled_from([d for d in range(1, 9) if stage // etp % d == 0]))
    return TrainerRanks(tp, cp, dp, pp, etp, ep, draw(st.booleans()))


@given(rank_sizes())
def test_coordinates_are_those_of_nested_loops(ranks: TrainerRanks) -> None:
    edp = ranks.tp * ranks.cp * ranks.dp // (ranks.etp * ranks.ep)
    assert ranks.edp == edp
    dense, experts = [], []
    if ranks.pipeline_before_data:
        for d in range(ranks.dp):
            for p in range(ranks.pp):
                dense += [(t, c, d, p) for c in range(ranks.cp) for t in range(ranks.tp)]
        for d in range(edp):
            for p in range(ranks.pp):
                experts += [(t, e, d, p) for e in range(ranks.ep) for t in range(ranks.etp)]
    else:
        for p in range(ranks.pp):
            for d in range(ranks.dp):
                dense += [(t, c, d, p) for c in range(ranks.cp) for t in range(ranks.tp)]
            for d in range(edp):
                experts += [(t, e, d, p) for e in range(ranks.ep) for t in range(ranks.etp)]
    world = range(ranks.world_size)
    assert [tuple(ranks.coordinate(r, axis) for axis in ("tp", "cp", "dp", "pp")) for r in world] == dense
    if not ranks.pipeline_before_data:  # Megatron refuses the other order where experts have stages of their own
        assert [tuple(ranks.coordinate(r, axis) for axis in ("etp", "ep", "edp", "pp")) for r in world] == experts
    else:
        assert [tuple(ranks.coordinate(r, axis) for axis in ("etp", "ep", "edp")) for r in world] == [
            row[:3] for row in experts
        ]


@settings(max_examples=40, deadline=None)
@given(rank_sizes())
def test_groups_are_those_of_megatron(ranks: TrainerRanks) -> None:
    import_megatron()
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-pp-dp" if ranks.pipeline_before_data else "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=ranks.tp, ep=1, dp=ranks.dp, pp=ranks.pp, cp=ranks.cp, order=order)
    experts = RankGenerator(tp=ranks.etp, ep=ranks.ep, dp=ranks.edp, pp=ranks.pp, cp=1, order=order)
    for generator, axes in (
        (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (experts, {"etp": "tp", "ep": "ep", "edp": "dp"}),
    ):
        for ours, theirs in axes.items():
            groups = {tuple(ranks.group(rank, ours)) for rank in range(ranks.world_size)}
            assert groups == {tuple(members) for members in generator.get_ranks(theirs)}


def flags(**overrides: int | bool | None) -> SimpleNamespace:
    values = {
        "actor_num_nodes": 4,
        "actor_num_gpus_per_node": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "use_tp_pp_dp_mapping": False,
    }
    return SimpleNamespace(**{**values, **overrides})


def test_sizes_from_the_flags() -> None:
    assert ranks_of(flags()) == TrainerRanks(tp=2, cp=2, dp=4, pp=2, etp=2, ep=1)
    moe = ranks_of(flags(expert_model_parallel_size=8, expert_tensor_parallel_size=1, use_tp_pp_dp_mapping=True))
    assert moe == TrainerRanks(tp=2, cp=2, dp=4, pp=2, etp=1, ep=8, pipeline_before_data=True)
    assert moe.edp == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "32 training slots cannot be divided by tensor 3 x pipeline 2 x context 2"),
        ({"expert_model_parallel_size": 5}, "expert tensor 2 x expert 5 x pipeline 2 = 20 parallel slots"),
    ],
)
def test_sizes_that_do_not_divide_the_slots(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranks_of(flags(**sizes))


def test_axes_are_listed_with_neighbors_first() -> None:
    assert TrainerRanks(tp=2, dp=4, pp=2, etp=2).axes() == ["tp", "dp", "pp"]
    assert TrainerRanks(tp=2, dp=4, pp=2, etp=2, pipeline_before_data=True).axes() == ["tp", "pp", "dp"]
    assert TrainerRanks(tp=2, dp=4, etp=1, ep=4).axes() == ["tp", "dp", "ep", "edp"]
    assert TrainerRanks().axes() == []
