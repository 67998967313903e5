"""Flags that users' own code declares, named on the command line, in the environment or in a file."""

from __future__ import annotations

import sys

import pytest

from slime.arguments import ArgumentError
from tests.support.arguments import parse

MODULE = """
def add(parser):
    parser.add_argument("--tree-depth", type=int, default=3)
    return parser

def add_width(parser):
    parser.add_argument("--tree-width", type=int, required=True)
    return parser

def clash(parser):
    parser.add_argument("--lr", type=float)
    return parser
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch):
    (tmp_path / "tree_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tree_plugin", raising=False)
    monkeypatch.delenv("SLIME_CUSTOM_ARGUMENTS_PATH", raising=False)


def test_a_path_on_the_command_line():
    assert parse("--custom-arguments-path", "tree_plugin.add").tree_depth == 3
    assert parse("--custom-arguments-path=tree_plugin.add", "--tree-depth", "5").tree_depth == 5


def test_a_path_in_the_environment(monkeypatch):
    monkeypatch.setenv("SLIME_CUSTOM_ARGUMENTS_PATH", "tree_plugin.add")
    assert parse("--tree-depth", "5").tree_depth == 5
    assert parse("--custom-arguments-path", "tree_plugin.add_width", "--tree-width", "2").tree_width == 2


def test_a_path_in_a_file_of_flags(tmp_path):
    """The flags that a run has dumped start it again, its own flags included."""
    dumped = tmp_path / "run.yaml"
    parse("--custom-arguments-path", "tree_plugin.add", "--tree-depth", "5", "--dump-config", dumped)
    assert parse("--config", dumped).tree_depth == 5


def test_the_function_of_the_caller_comes_too():
    def own(parser):
        parser.add_argument("--tree-height", type=int)

    words = ("--custom-arguments-path", "tree_plugin.add", "--tree-height", "4", "--tree-depth", "5")
    args = parse(*words, add_custom_arguments=own)
    assert (args.tree_height, args.tree_depth) == (4, 5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tree_plugin.clash", "adds a flag that exists already"),
        ("tree_plugin.ad", "has no attribute 'ad'; did you mean tree_plugin.add"),
        ("tree_plugin.add_width", r"missing: --tree-width \(added by"),
    ],
)
def test_what_is_wrong_is_said(path, message):
    with pytest.raises(ArgumentError, match=message):
        parse("--custom-arguments-path", path)


def test_a_flag_of_somebody_elses_fork_names_both_ways_out():
    with pytest.raises(ArgumentError) as caught:
        parse("--tree-depth", "5")
    assert "unknown flag --tree-depth" in str(caught.value)
    assert "--custom-arguments-path" in str(caught.value)
    assert "--ignore-unknown-flags" in str(caught.value)
