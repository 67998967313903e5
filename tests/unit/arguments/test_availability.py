from __future__ import annotations

import fnmatch
import re
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from slime.arguments.availability import (
    inert_messages,
    is_available,
    reasons,
    refused_values,
    unavailable_messages,
)
from slime.arguments.command_line import flags_by_option
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag
from slime.arguments.help import status_text
from slime.arguments.passthrough.traits import TRAITS
from slime.arguments.traits import NONE, Traits
from tests.support.arguments import dry, parse


def test_the_table_names_declared_flags_and_choices(flags):
    for flag in flags:
        assert set(refused_values(flag)) <= set(flag.choices or ()), flag.option
    passed = [flag.dest for flag in flags if flag.source != "slime"]
    for pattern in TRAITS:
        assert fnmatch.filter(passed, pattern), pattern


def test_the_table_can_be_read(flags):
    """``pytest -s`` prints it: a line for every flag, or values of one, whose feature does not exist yet."""
    lines = [f"{flag.option:44} {status_text(flag)}" for flag in flags]
    table = [line for line in lines if "not available yet" in line]
    print("\n".join(["", *table]))
    assert len(table) == sum(bool(not is_available(f) or refused_values(f)) for f in flags if not f.traits.inert)
    assert any(line.split() == ["--moe-token-drop-policy", "not", "available", "yet:", "position"] for line in table)


def test_every_unavailable_flag_is_refused_by_name(flags):
    """Nothing in the table is silently ignored, whatever its type."""
    for flag in flags:
        values = [object()] if not is_available(flag) else list(refused_values(flag))
        for value in values:
            messages = inert_messages if flag.traits.inert else unavailable_messages
            (message,) = messages({flag.dest: value}, flags)
            assert flag.option in message


def test_the_default_of_an_unavailable_flag_may_be_spelled_out(flags):
    values = {"rollout_top_p": 1.0, "update_weight_mode": "full", "use_opd": False, "min_batch_collection_ratio": 1.0}
    assert unavailable_messages(values, flags) == inert_messages(values, flags) == []


def test_one_trait_makes_a_flag_available(flags):
    flag = next(flag for flag in flags if flag.dest == "cache_mla_latents")
    assert unavailable_messages({"cache_mla_latents": True}, [flag]) != []
    assert unavailable_messages({"cache_mla_latents": True}, [replace(flag, traits=NONE)]) == []


def test_variables_that_switch_on_what_does_not_exist_are_refused(flags):
    """Training would continue without the feature, and nothing would say so."""
    variables = {"MEGATRON_USE_SGLANG_SPARSE_MLA": "1", "MEGATRON_USE_SGLANG_ROPE": "1", "DSA_KV_FP8_QAT": "0"}
    messages = unavailable_messages({"train_env_vars": {**variables, "NCCL_ALGO": "Ring"}}, flags)
    assert messages == [
        f"--train-env-vars {name} is not available yet in this version; leave it out" for name in [*variables][:2]
    ]
    for others in ({}, ["no object"], None):
        assert unavailable_messages({"train_env_vars": others}, flags) == []


def test_the_way_out_lists_the_other_choices():
    name, option = "rollout_data_transport", "--rollout-data-transport"
    flag = Flag(
        name, (option,), "object-store", choices=("object-store", "file", "nixl"), traits=Traits(not_yet=("nixl",))
    )
    (message,) = unavailable_messages({name: "nixl"}, [flag])
    assert message == f"{option} nixl is not available yet in this version; use object-store or file"


def test_each_flag_has_one_reason_and_each_pattern_a_flag():
    matched, found = {}, {}
    for flag in flags_by_option().values():
        if not flag.traits.inert and (refused_values(flag) or not is_available(flag)):
            patterns = [(one.name, p) for one in reasons() for p in one.flags if fnmatchcase(flag.option, p)]
            found[flag.dest] = {name for name, _ in patterns}
            matched.update(dict.fromkeys(patterns))
    assert {dest: names for dest, names in found.items() if len(names) != 1} == {}
    assert [p for one in reasons() for p in one.flags if (one.name, p) not in matched] == []


def test_what_to_do_instead_can_be_done():
    """Flags that a reason names exist, and are available."""
    flags = flags_by_option()
    named = {word for one in reasons() for word in re.findall(r"--[a-z\d-]+[a-z\d]", f"{one.why} {one.instead}")}
    assert [word for word in sorted(named) if word not in flags or not is_available(flags[word])] == []
    assert [one.name for one in reasons() if not one.why.endswith(".") or one.instead.endswith(".")] == []


def test_a_run_is_refused_and_a_dry_run_lists():
    with pytest.raises(ArgumentError, match="--cache-mla-latents is not available yet"):
        parse("--cache-mla-latents", "--qk-clip")
    args = dry("--cache-mla-latents", "--qk-clip")
    assert sorted(message.split()[0] for message in args.not_available) == [
        "--cache-mla-latents",
        "--qk-clip",
    ]


def test_flags_without_effect_warn(capsys):
    args = parse("--http-proxy", "http://proxy:80")
    assert args.http_proxy == "http://proxy:80"
    assert "warning: --http-proxy has no effect: set the environment" in capsys.readouterr().err
