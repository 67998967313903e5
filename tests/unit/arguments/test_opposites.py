"""Switches can be given back their default: ``--no-x`` of ``--x``, ``--x`` of ``--disable-x``; the last one wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.arguments.command_line import all_flags, build_parser, read_words
from slime.arguments.groups import slime_flags
from tests.support.arguments import parse

DEFAULT_ON = {
    "--rollout-global-dataset": "rollout_global_dataset",
    "--compute-advantages-and-returns": "compute_advantages_and_returns",
    "--grpo-std-normalization": "grpo_std_normalization",
    "--rewards-normalization": "rewards_normalization",
    "--wandb-random-suffix": "wandb_random_suffix",
}
"""The switches that slime <= 0.3.1 has on, by the form that leaves them so."""


@pytest.mark.parametrize(("option", "dest"), DEFAULT_ON.items())
def test_the_positive_form_of_what_is_on(option: str, dest: str) -> None:
    assert getattr(parse("--n-samples-per-prompt", 2, option), dest) is True
    parser = build_parser(all_flags())
    negative = f"--disable-{option.removeprefix('--')}"
    assert read_words(parser, [negative, option])[0] == {dest: True}
    assert read_words(parser, [option, negative])[0] == {dest: False}


def test_every_switch_of_slime_has_both_forms() -> None:
    parser, options = build_parser(all_flags()), {o for flag in all_flags() for o in flag.options}
    switches = [flag for flag in slime_flags() if flag.action in ("true", "false")]
    assert len(switches) > 50
    for flag in switches:
        name = flag.options[0].removeprefix("--")
        stem = name.removeprefix("disable-").removeprefix("no-")
        opposite = f"--{stem}" if stem != name else f"--no-{name}"
        assert opposite not in options, "no flag is taken for the opposite of another one"
        assert read_words(parser, [opposite])[0] == {flag.dest: flag.default}
        assert read_words(parser, [*flag.options, opposite])[0] == {flag.dest: flag.default}
        assert read_words(parser, [opposite, *flag.options])[0] == {flag.dest: not flag.default}


def test_the_command_line_switches_off_what_a_file_switches_on(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("partial_rollout: true\nrollout_shuffle: true\n")
    args = parse("--config", tmp_path / "run.yaml", "--no-partial-rollout")
    assert (args.partial_rollout, args.rollout_shuffle) == (False, True)


def test_a_flag_of_the_users_own_wins_over_an_opposite() -> None:
    def mine(parser):
        parser.add_argument("--no-colocate", dest="of_my_own", default="x")

    args = parse("--no-colocate", "y", add_custom_arguments=mine)
    assert (args.of_my_own, args.colocate) == ("y", False)
