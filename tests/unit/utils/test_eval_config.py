"""Evaluation data sets under the path that plug-ins import; files and fall-backs are tested with the arguments."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, []),
        ([], []),
        ([{"name": "a", "path": "p"}], [{"name": "a", "path": "p"}]),
        ({"a": {"path": "p"}, "b": None}, [{"name": "a", "path": "p"}, {"name": "b"}]),
        ({"a": {"name": "mine", "path": "p"}}, [{"name": "mine", "path": "p"}]),
    ],
)
def test_lists_and_mappings_of_data_sets(given, expected):
    assert ensure_dataset_list(given) == expected


def test_lists_are_copied_and_other_things_refused():
    given = [{"name": "a"}]
    ensure_dataset_list(given)[0]["name"] = "changed"
    assert given == [{"name": "a"}]
    with pytest.raises(TypeError, match="a list of mappings or a mapping by name, got str"):
        ensure_dataset_list("a.jsonl")


def test_an_entry_wins_over_defaults_and_these_over_flags():
    args = Namespace(eval_temperature=None, rollout_temperature=1.0, eval_top_p=0.5, rollout_top_p=1.0)
    entries = ensure_dataset_list({"a": {"path": "p", "top_p": 0.9}, "b": {"path": "q"}})
    first, second = build_eval_dataset_configs(args, entries, {"top_k": 7})
    assert isinstance(first, EvalDatasetConfig)
    assert (first.top_p, first.top_k, first.temperature) == (0.9, 7, 1.0)
    assert (second.top_p, second.top_k, second.temperature) == (0.5, 7, 1.0)
    for wrong, error in (
        (([], {}), ValueError),
        (([{"path": "p"}], {}), ValueError),
        (([{"name": "a", "path": "p"}], {"tpo_p": 1}), ValueError),
        (([{"name": "a", "path": "p", "tpo_p": 1}], {}), TypeError),
    ):
        with pytest.raises(error):
            build_eval_dataset_configs(args, *wrong)
