"""Every flag that slime declares, against the table of flags, attributes, forms and defaults users rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.arguments.command_line import read_words
from slime.arguments.groups import slime_flags

TABLE = Path(__file__).parents[2] / "data" / "arguments" / "flags.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
SAMPLES = {
    "str": (["some/text"], "some/text"),
    "int": (["7"], 7),
    "float": (["0.25"], 0.25),
    "json": (['{"a": "b"}'], {"a": "b"}),
    "repeated str": (["one"], ["one"]),
    "list of str": (["one", "two"], ["one", "two"]),
    "list of int": (["1", "2"], [1, 2]),
}


def test_no_flag_is_missing_and_none_is_undocumented():
    assert sorted(flag.option for flag in slime_flags()) == sorted(row[0] for row in ROWS)


@pytest.mark.parametrize(("option", "attribute", "form", "default"), ROWS, ids=[row[0] for row in ROWS])
def test_flag(option, attribute, form, default, parser, flags):
    (flag,) = [flag for flag in flags if option in flag.options]
    assert flag.dest == attribute
    assert flag.default == json.loads(default)
    if form in ("switch on", "switch off"):
        assert read_words(parser, [option])[0] == {attribute: form == "switch on"}
    elif form == "on or off":
        assert read_words(parser, [option])[0] == {attribute: True}
        assert read_words(parser, ["--no-" + option[2:]])[0] == {attribute: False}
    elif form == "plan or one of plan|full":
        assert read_words(parser, [option, "--lr", "1"])[0] == {attribute: "plan", "lr": 1.0}
        assert [read_words(parser, [f"{option}={choice}"])[0][attribute] for choice in flag.choices] == ["plan", "full"]
    elif (form.startswith(("one of ", "list of ")) and "|" in form) or form == "one of megatron":
        choices = form.removeprefix("one of ").removeprefix("list of ").split("|")
        assert sorted(flag.choices) == sorted(choices)
        for choice in choices:
            value = [choice] if form.startswith("list") else choice
            assert read_words(parser, [option, choice])[0] == {attribute: value}
    else:
        words, value = SAMPLES[form]
        found = read_words(parser, [option, *words])[0][attribute]
        assert found == value
        assert type(found) is type(value)


def test_defaults_reach_the_namespace():
    from tests.support.arguments import minimal_flags, parse

    args, given = parse(), minimal_flags()
    derived = {"offload", "offload_train", "offload_rollout", "ref_load", "load", "over_sampling_batch_size"}
    derived |= {
        "eps_clip_high",
        "eval_function_path",
        "start_rollout_id",
        "grpo_std_normalization",
        "padded_vocab_size",
    }
    for option, attribute, _, default in ROWS:
        if option not in given and attribute not in derived:
            assert getattr(args, attribute) == json.loads(default), option
