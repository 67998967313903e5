"""Flags and files of environments."""

from __future__ import annotations

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.files.environments import environments_of
from tests.support.arguments import parse

GENERATE = ["--custom-generate-function-path", "slime.rollout.environments.generate"]
SOURCE = ["--data-source-path", "slime.rollout.environments.EnvironmentDataSource"]


def refused(*flags: str) -> str:
    with pytest.raises((ArgumentError, SystemExit)) as error:
        parse(*flags)
    return str(error.value)


def test_paths_and_a_file(tmp_path):
    args = parse(*GENERATE, "--environment-path", "my.envs.One", "your.Two")
    assert {name: (e.path, e.weight) for name, e in environments_of(args).items()} == {
        "One": ("my.envs.One", 1.0), "Two": ("your.Two", 1.0)
    }  # fmt: skip
    path = tmp_path / "e.yaml"
    path.write_text("environments:\n- path: my.One\n  weight: 2\n  options: {size: 3}\n- {path: my.One, name: b}\n")
    args = parse(*GENERATE, "--environment-config", str(path))
    found = environments_of(args)
    assert {name: (e.path, e.weight, e.options) for name, e in found.items()} == {
        "One": ("my.One", 2.0, {"size": 3}), "b": ("my.One", 1.0, {})
    }  # fmt: skip


def test_mistakes_in_a_file_have_their_lines(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(
        "environments:\n- path: my.One\n  weigth: 2\n- path: my.Two\n  difficulty:\n    levels: 2\n    start: 2\n"
    )
    assert "line 3, environments[0].weigth: unknown key; did you mean weight?" in refused(
        *GENERATE, "--environment-config", str(path)
    )
    path = tmp_path / "f.yaml"
    path.write_text(
        "environments:\n- path: my.One\n  weight: 0\n- path: your.One\n  weight: 0\n"
        "  difficulty: {levels: 2, start: 2, raise_at: 0.5, lower_at: 0.5}\n"
    )
    message = refused(*GENERATE, "--environment-config", str(path))
    assert "every weight is 0" in message
    assert "names must be unique, and One is on line" in message
    assert "environments[1].difficulty.start: expected less than levels, which is 2, got 2" in message
    assert "environments[1].difficulty.lower_at: expected less than raise_at, which is 0.5, got 0.5" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (GENERATE, "needs environments; give --environment-path or --environment-config"),
        (SOURCE, "needs environments; give --environment-path or --environment-config"),
        ([*GENERATE, "--environment-path", "a.X", "b.X"], "two classes have the same name"),
        (
            [*GENERATE, "--environment-path", "a.X", "--environment-config", "x.yaml"],
            "--environment-config x.yaml and --environment-path both name environments",
        ),
    ],
)
def test_combinations_that_are_refused(flags, message):
    assert message in refused(*flags)


def test_environments_without_the_function_have_no_effect(capsys):
    parse("--environment-path", "a.X")
    assert "--environment-path has no effect without --custom-generate-function-path" in capsys.readouterr().err
