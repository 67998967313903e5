from __future__ import annotations

import pytest

from slime.arguments.command_line import nearest, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.parse import parse_args
from tests.support.arguments import dry, minimal_flags, parse


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--rollout-batch-sizes", "--rollout-batch-size"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--sglang-mem-fraction-statik", "--sglang-mem-fraction-static"),
        ("--mem-fraction-static", "--sglang-mem-fraction-static"),
        ("--router-polisy", "--router-policy"),
        ("--target-modules", "--lora-target-modules"),
        ("--policy", "--router-policy"),
        ("--no-swiglu", "--swiglu"),
        ("--advantage-estimater", "--advantage-estimator"),
        ("--num-alyers", "--num-layers"),
        ("--tensor-model-parallel", "--tensor-model-parallel-size"),
        ("--max-tokens-gpu", "--max-tokens-per-gpu"),
    ],
)
def test_nearest_known_flag(typed, meant, parser):
    assert nearest(typed, list(parser._option_string_actions)) == meant


def test_no_flag_is_near_to_nonsense(parser):
    assert nearest("--zzyzx-qqq", list(parser._option_string_actions)) is None


@pytest.mark.parametrize("typed", ["--lora-depth", "--adapter-rank", "--critic-lr-warmup", "--actor-lr", "--grpo"])
def test_a_flag_of_another_name_is_not_near(typed, parser):
    """A first word more or less says something else: there is --lr-warmup-init."""
    assert nearest(typed, list(parser._option_string_actions)) is None


def test_an_abbreviation_is_unknown(parser):
    with pytest.raises(ArgumentError, match=r"unknown flag --rollout-batch; did you mean --rollout-batch-size\?"):
        read_words(parser, ["--rollout-batch", "8"])


def test_all_unknown_flags_are_named_at_once(parser):
    with pytest.raises(ArgumentError) as caught:
        read_words(parser, ["--colocat", "--lrr", "1", "--lr", "2"])
    assert str(caught.value).count("unknown flag") == 2


def test_unknown_flags_can_be_ignored(capsys):
    args = parse("--colocat", "yes", "--ignore-unknown-flags", "--lr", "0.5")
    assert args.lr == 0.5
    assert args.colocate is False
    assert "warning: unknown words are ignored: --colocat yes" in capsys.readouterr().err


def test_a_key_that_is_given_twice_is_not_shown():
    words = ["--wandb-key", "first-one", "--wandb-key", "second-one", "--ignore-unknown-flags", "--my-token", "third"]
    args = dry(*words)
    assert "--wandb-key is given 2 times; the last one holds: --wandb-key ***" in args.warnings
    assert not [text for text in args.warnings if "-one" in text or "third" in text]


def test_the_last_of_repeated_flags_wins_and_lists_are_not_shared():
    assert parse("--lr", "0.5", "--lr", "0.25").lr == 0.25
    one = parse("--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d")
    assert one.rollout_sample_hook_path == ["a.b", "c.d"]
    assert parse().rollout_sample_hook_path == []


def test_values_may_be_negative_numbers():
    assert parse("--rollout-top-k", "-1", "--log-probs-chunk-size=-1").rollout_top_k == -1


def test_replaying_dumps_keeps_engine_and_router_flags():
    args = parse("--debug-train-only", "--sglang-mem-fraction-static", "0.5", "--router-policy", "round_robin")
    assert args.sglang_mem_fraction_static == 0.5
    assert args.router_policy == "round_robin"


def test_explicit_flags_are_remembered():
    args = parse("--lr", "1e-6")
    assert "lr" in args.explicit_flags
    assert "min_lr" not in args.explicit_flags


def test_users_add_their_own_flags():
    def add(parser):
        parser.add_argument("--my-depth", type=int, default=3, help="depth")
        parser.set_defaults(my_hidden="x")
        return parser

    assert parse(add_custom_arguments=add).my_depth == 3
    assert parse(add_custom_arguments=add).my_hidden == "x"
    assert parse("--my-depth", "5", add_custom_arguments=add).my_depth == 5
    with pytest.raises(ArgumentError, match="did you mean --my-depth"):
        parse("--my-dept", "5", add_custom_arguments=add)


def test_users_may_change_a_default():
    def add(parser):
        parser.set_defaults(lr=0.125)

    assert parse(add_custom_arguments=add).lr == 0.125
    assert parse("--lr", "0.5", add_custom_arguments=add).lr == 0.5


def test_a_default_of_a_user_is_not_given(tmp_path):
    """A configuration file wins over it, and it may stand in for a flag that is needed."""

    def add(parser):
        parser.set_defaults(lr=0.125, rollout_batch_size=8)

    (tmp_path / "run.yaml").write_text("lr: 0.25\n")
    args = parse("--config", tmp_path / "run.yaml", add_custom_arguments=add)
    assert (args.lr, args.rollout_batch_size) == (0.25, 4)
    assert "lr" not in parse(add_custom_arguments=add).explicit_flags
    words = minimal_flags()
    place = words.index("--rollout-batch-size")
    assert parse_args([*words[:place], *words[place + 2 :]], add_custom_arguments=add).rollout_batch_size == 8


def test_a_default_of_a_user_is_checked():
    with pytest.raises(ArgumentError, match="--eps-clip: expected at least 0, got -1"):
        parse(add_custom_arguments=lambda parser: parser.set_defaults(eps_clip=-1))
    with pytest.raises(ArgumentError, match="--cache-mla-latents is not available yet"):
        parse(add_custom_arguments=lambda parser: parser.set_defaults(cache_mla_latents=True))


def test_a_users_flag_may_be_needed(tmp_path):
    def add(parser):
        parser.add_argument("--my-depth", type=int, required=True)

    with pytest.raises(ArgumentError, match="missing: --my-depth"):
        parse(add_custom_arguments=add)
    path = tmp_path / "run.yaml"
    assert parse("--my-depth", "5", "--dump-config", path, add_custom_arguments=add).my_depth == 5
    assert parse_args(["--config", str(path)], add_custom_arguments=add).my_depth == 5


def test_a_users_flag_must_be_new():
    def add(parser):
        parser.add_argument("--colocate")

    with pytest.raises(ArgumentError, match="exists already"):
        parse(add_custom_arguments=add)


def test_extra_args_provider_adds_flags_to_a_foreign_parser():
    import argparse

    from slime.utils.arguments import get_slime_extra_args_provider

    foreign = argparse.ArgumentParser()
    foreign.add_argument("--lr", type=float, default=0.01)
    args = get_slime_extra_args_provider()(foreign).parse_args(["--rollout-batch-size", "3"])
    assert (args.rollout_batch_size, args.lr, args.eps_clip) == (3, 1e-6, 0.2)
