"""Megatron's flags as launch scripts write them, and every field of its configuration classes accounted for."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from slime.arguments.availability import is_available, unavailable_messages
from slime.arguments.command_line import read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog, megatron
from slime.arguments.passthrough.megatron import HAND_TABLE, NOT_FLAGS, script_flags
from tests.support.arguments import dry, parse

DATA = Path(__file__).parents[2] / "data" / "arguments"
SCRIPTS = Path(__file__).parents[3] / "scripts"


def _script_flags() -> list[tuple[str, str, str]]:
    lines = (DATA / "script_flags.tsv").read_text().splitlines()
    rows = csv.reader((line for line in lines if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [(words, attribute, value) for _, words, attribute, value in rows]


@pytest.mark.parametrize(("words", "attribute", "value"), _script_flags(), ids=[w[:60] for w, _, _ in _script_flags()])
def test_flags_of_launch_scripts(parser, words: str, attribute: str, value: str) -> None:
    """Every Megatron flag that launch scripts carry sets its attribute, to a value of the right type."""
    values, rest = read_words(parser, words.split())
    expected = json.loads(value)
    assert (values, rest) == ({attribute: expected}, [])
    assert type(values[attribute]) is type(expected)


def test_the_table_has_every_flag_of_the_launch_scripts(flags) -> None:
    """Another flag of Megatron in a script needs a line that says what it sets."""
    offered = {option for flag in flags if flag.source == "megatron" for option in flag.options}
    texts = [path.read_text() for path in SCRIPTS.rglob("*.sh")]
    used = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)} & offered
    assert len(used) > 50
    assert used <= {words.split()[0] for words, _, _ in _script_flags()}


def test_every_field_is_a_flag_or_says_why_not(flags) -> None:
    """A field that a new megatron-core brings fails here until it is a flag or stands in ``NOT_FLAGS``."""
    records = catalog.records(catalog.MEGATRON)
    named = {name for flag in flags for name in (flag.dest, flag.field) if name}
    unclassified = [r["name"] for r in records if r["name"] not in named and r["name"] not in NOT_FLAGS]
    inexpressible = {r["name"] for r in records if r["kind"] is None}
    print(f"{len(records)} fields; no flag is made of", *(f"{n}: {why}" for n, why in NOT_FLAGS.items()), sep="\n  ")
    assert unclassified == []
    assert len(records) == 323  # distinct names in the classes of megatron-core 0.16.1
    assert len(inexpressible) == 19
    dtypes = {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}
    assert inexpressible - NOT_FLAGS.keys() == dtypes  # flags of their own take the names of dtypes
    assert set(NOT_FLAGS) <= {r["name"] for r in records}
    assert not set(NOT_FLAGS) & named


def test_every_flag_of_a_field_has_help(flags) -> None:
    """Fields megatron-core does not describe are the only ones without."""
    undescribed = {r["name"] for r in catalog.records(catalog.MEGATRON) if not r["help"]}
    assert [f.option for f in flags if f.source == "megatron" and not f.help and f.dest not in undescribed] == []


# Option -> (words, field of a configuration class, its value), as Megatron-LM's scripts translate them.
TRANSLATED = {
    "--num-experts 4": ("num_moe_experts", 4),
    "--swiglu": ("gated_linear_unit", True),
    "--norm-epsilon 1e-6": ("layernorm_epsilon", 1e-6),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
    "--use-gated-attention": ("attention_output_gate", True),
    "--attention-output-gate": ("attention_output_gate", True),
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "--use-nccl-ub": ("nccl_ub", True),
    "--te-rng-tracker": ("use_te_rng_tracker", True),
    "--ddp-bucket-size 100": ("bucket_size", 100),
    "--ddp-average-in-collective": ("average_in_collective", True),
    "--no-rope-fusion": ("apply_rope_fusion", False),
    "--fp8-format hybrid": ("fp8", "hybrid"),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--no-initialization": ("perform_initialization", False),
}


@pytest.mark.parametrize("words", TRANSLATED)
def test_the_field_of_a_translated_flag_gets_its_value(words: str) -> None:
    field, value = TRANSLATED[words]
    args = dry("--debug-rollout-only", *words.split())  # without a trainer the flags need not fit a checkpoint
    assert getattr(args, field) == value


def test_layers_of_the_outer_stages_reach_their_fields() -> None:
    args = dry(
        "--debug-rollout-only", "--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "3"
    )
    assert (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage) == (2, 3)


def test_offloading_the_optimizer_offloads_all_of_it_as_in_megatron_lm() -> None:
    """The configuration class defaults to no part at all, with which --optimizer-cpu-offload would do nothing."""
    assert parse("--optimizer-cpu-offload").optimizer_offload_fraction == 1.0


def test_a_low_precision_optimizer_state_needs_its_switch() -> None:
    with pytest.raises(ArgumentError, match="--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"):
        parse("--exp-avg-dtype", "bf16")
    assert parse("--exp-avg-dtype", "bf16", "--use-precision-aware-optimizer").exp_avg_dtype == "bf16"


class TestFlagsOfTrainingScripts:
    def test_each_is_either_without_effect_or_refused(self) -> None:
        for flag in script_flags():
            assert not is_available(flag), flag.option
            changed = {flag.dest: object()}
            assert bool(unavailable_messages(changed, [flag])) != bool(flag.traits.inert), flag.option

    def test_they_are_in_no_configuration_class(self) -> None:
        """A flag that megatron-core reads belongs to the other table, where it acts."""
        fields = {record["name"] for record in catalog.records(catalog.MEGATRON)} - NOT_FLAGS.keys()
        assert {flag.dest for flag in script_flags()} & fields == set()
        assert {flag.dest for flag in script_flags()} & {flag.dest for flag in HAND_TABLE} == set()

    def test_without_effect_they_warn(self, capsys) -> None:
        args = parse("--log-throughput", "--exit-interval", "10", "--tokenizer-type", "HuggingFaceTokenizer")
        reported = capsys.readouterr().err
        assert "--log-throughput has no effect: slime logs by itself" in reported
        assert "--exit-interval has no effect: a run ends after --num-rollout" in reported
        assert "--tokenizer-type has no effect: the tokenizer is that of --hf-checkpoint" in reported
        assert (args.log_throughput, args.exit_interval) == (True, 10)

    def test_what_would_change_the_training_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="--rampup-batch-size is not available yet"):
            parse("--rampup-batch-size", "16", "16", "1000")
        with pytest.raises(ArgumentError, match=r"--ckpt-format zarr is not available yet.*torch_dist"):
            parse("--ckpt-format", "zarr")


def test_the_nine_names_that_differ_from_their_fields(flags) -> None:
    """Looked up in Megatron-LM: option -> attribute."""
    expected = {
        "--no-rope-fusion": "apply_rope_fusion",
        "--no-masked-softmax-fusion": "masked_softmax_fusion",
        "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
        "--no-bias-dropout-fusion": "bias_dropout_fusion",
        "--attention-softmax-in-fp32": "attention_softmax_in_fp32",
        "--no-overlap-p2p-communication": "overlap_p2p_comm",
        "--use-nccl-ub": "use_nccl_ub",
        "--no-align-param-gather": "align_param_gather",
        "--muon-no-split-qkv": "muon_split_qkv",
    }
    found: dict[str, Flag] = {option: flag for flag in flags for option in flag.options}
    assert {option: found[option].dest for option in expected} == expected
    assert found["--attention-softmax-in-fp32"].default is False  # the class says True


def test_a_true_boolean_has_both_spellings_that_turn_it_off(parser, flags) -> None:
    """``--no-x`` and ``--disable-x``, unless megatron-core or the hand-written table names an option of its own."""
    own_name = {r["name"] for r in catalog.records(catalog.MEGATRON) if r["options"]}
    by_hand = {name for flag in HAND_TABLE for name in (flag.dest, flag.field)}
    checked = 0
    for record in catalog.records(catalog.MEGATRON):
        name = record["name"]
        if record["kind"] == "bool" and record["default"] is True and name not in own_name | by_hand:
            for spelling in ("--no-", "--disable-"):
                assert read_words(parser, [spelling + name.replace("_", "-")])[0] == {name: False}
            checked += 1
    assert checked >= 10


def test_aliases_name_fields(flags) -> None:
    fields = {record["name"] for record in catalog.records(catalog.MEGATRON)}
    assert set(megatron.aliases().values()) <= fields
    assert set(megatron.aliases()) <= {flag.dest for flag in flags}


def test_help_names_nothing_it_does_not_offer() -> None:
    """Reasons name flags that exist."""
    from slime.arguments.command_line import all_flags

    known = {option for flag in all_flags() for option in flag.options}
    inert = [flag.traits.inert for flag in all_flags()]
    texts = [*NOT_FLAGS.values(), *inert, *(flag.help for flag in [*HAND_TABLE, *script_flags()])]
    named = {option for text in texts for option in re.findall(r"(?<!\w)--[a-z][a-z0-9-]+", text)}
    assert named <= known
