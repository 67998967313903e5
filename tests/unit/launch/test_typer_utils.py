from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.launch.typer_utils import dataclass_cli

typer = pytest.importorskip("typer")


@dataclass
class Script:
    model: str
    num_nodes: int = 1
    offload: bool = False
    extra: list[str] = field(default_factory=list)


def run(words: list[str], env: dict[str, str] | None = None) -> tuple[int, Any]:
    from typer.testing import CliRunner

    seen = []

    @dataclass_cli
    def main(args: Script) -> None:
        seen.append(args)

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, words, env=env)
    return result.exit_code, seen[0] if seen else result.output


def test_a_flag_and_a_variable_per_field() -> None:
    assert run(["--model", "m"]) == (0, Script("m"))
    assert run(["--model", "m", "--num-nodes", "4", "--offload", "--extra", "a", "--extra", "b"]) == (
        0, Script("m", 4, True, ["a", "b"]),
    )  # fmt: skip
    assert run([], {"SLIME_SCRIPT_MODEL": "m", "SLIME_SCRIPT_NUM_NODES": "2"}) == (0, Script("m", 2))
    assert run(["--num-nodes", "2"])[0] == 2  # a field without a default must be given


def test_what_is_no_such_function() -> None:
    with pytest.raises(TypeError, match=r"must take one argument annotated with a dataclass, got \['a', 'b'\]"):
        dataclass_cli(lambda a, b: None, env_var_prefix="X_")
