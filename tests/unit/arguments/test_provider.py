"""slime's flags in a parser that a tool brings."""

from __future__ import annotations

import argparse

from slime.arguments.groups import slime_flags
from slime.utils.arguments import get_slime_extra_args_provider


def _megatrons() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--eval-interval", type=int, default=1000)
    parser.add_argument("--num-layers", type=int)
    return parser


def test_every_flag_of_slime_is_there_with_slimes_default() -> None:
    args = get_slime_extra_args_provider()(_megatrons()).parse_args([])
    assert {flag.dest: getattr(args, flag.dest) for flag in slime_flags()} == {
        flag.dest: flag.default for flag in slime_flags()
    }
    assert args.num_layers is None


def test_a_flag_that_is_there_keeps_its_form() -> None:
    args = get_slime_extra_args_provider()(_megatrons()).parse_args(["--lr", "3", "--eval-interval", "5"])
    assert (args.lr, args.eval_interval) == (3.0, 5)


def test_a_users_flags_come_first() -> None:
    seen = []

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        seen.extend(parser._option_string_actions)
        parser.add_argument("--rollout-seed", type=str, default="a")
        parser.add_argument("--mine", type=int, default=7)
        return parser

    args = get_slime_extra_args_provider(add)(_megatrons()).parse_args(["--rollout-seed", "x1"])
    assert "--rollout-batch-size" not in seen
    assert (args.rollout_seed, args.mine) == ("x1", 7)


def test_it_is_an_extra_args_provider() -> None:
    """It takes and returns a parser, and may be used for several."""
    provider = get_slime_extra_args_provider()
    first, second = provider(_megatrons()), provider(_megatrons())
    assert first.parse_args([]).rollout_sample_hook_path == second.parse_args([]).rollout_sample_hook_path == []
