from __future__ import annotations

import fnmatch

import pytest

from slime.arguments.availability import (
    ANY,
    INERT,
    NOT_YET,
    NOT_YET_MEGATRON,
    is_available,
    refuse_unavailable,
    refused_values,
)
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag


def test_the_table_names_declared_flags_and_choices(flags):
    known = {flag.dest: flag for flag in flags}
    for name, entry in NOT_YET.items():
        assert name in known, name
        if entry != ANY:
            assert set(entry) <= set(known[name].choices), name
    assert set(INERT) <= set(known)
    megatron = [flag.dest for flag in flags if flag.source == "megatron"]
    for pattern in NOT_YET_MEGATRON:
        assert fnmatch.filter(megatron, pattern), pattern


def test_every_unavailable_flag_is_refused_by_name(flags):
    """Nothing in the table is silently ignored, whatever its type."""
    for flag in flags:
        values = [object()] if not is_available(flag) else list(refused_values(flag))
        for value in values:
            with pytest.raises(ArgumentError, match=flag.option):
                refuse_unavailable({flag.dest: value}, flags)


def test_the_default_of_an_unavailable_flag_may_be_spelled_out(flags):
    refuse_unavailable({"rollout_top_p": 1.0, "update_weight_mode": "full", "use_opd": False}, flags)


def test_one_line_of_the_table_makes_a_flag_available(monkeypatch, flags):
    monkeypatch.delitem(NOT_YET, "use_opd")
    refuse_unavailable({"use_opd": True}, flags)


def test_the_way_out_lists_the_other_choices():
    flag = Flag("advantage_estimator", ("--advantage-estimator",), "grpo", choices=("grpo", "gspo", "ppo"))
    with pytest.raises(ArgumentError, match=r"--advantage-estimator ppo is not available yet .* use one of grpo, gspo"):
        refuse_unavailable({"advantage_estimator": "ppo"}, [flag])
