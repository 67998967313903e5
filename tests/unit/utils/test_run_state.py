"""Attributes of ``args`` that the product sets after parsing."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.utils.run_state import RunState, record
from tests.unit.arguments.test_args_type import PARTS

ROOT = Path(__file__).parents[3]
NAMESPACES_OF_OTHERS = {
    "slime/backends/megatron_utils/arguments.py": "it completes the namespace of a tool's parser",
}


def written(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of assignments to attributes of ``args``, of any object whose name ends in ``args``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                if ast.unparse(owner).split(".")[-1] == "args":
                    yield node.lineno, name


def test_record_is_the_only_writer_outside_of_the_arguments() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "slime").rglob("*.py"))
        if not path.is_relative_to(ROOT / "slime" / "arguments")
        and path.relative_to(ROOT).as_posix() not in NAMESPACES_OF_OTHERS
        for line, name in written(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("args.lr = 1", ["lr"]),
        ("self.args.rank, self.args.world_size = 0, 1", ["rank", "world_size"]),
        ("args.n += 1", ["n"]),
        ("self.args = args", []),
        ("server_args.port = 1", []),
    ],
)
def test_what_counts_as_a_write(source: str, names: list[str]) -> None:
    assert [name for _, name in written(source)] == names


def test_types_are_those_of_the_arguments() -> None:
    """Before they are set, some are None."""
    read = {name: hint.removesuffix(" | None") for part in PARTS for name, hint in part.__annotations__.items()}
    hints = {name: hint.__forward_arg__ for name, hint in RunState.__annotations__.items()}
    of_trainers = {"rank", "world_size"}  # Megatron's own names, without a flag
    assert set(hints) - set(read) <= of_trainers
    assert {name: hint.removesuffix(" | None") for name, hint in hints.items() if name in read} == {
        name: read[name] for name in hints if name in read
    }


def test_hooks_read_what_was_recorded() -> None:
    args = Namespace(run_dir=None)
    record(args, run_dir="runs/1", rank=3)
    assert (args.run_dir, args.rank) == ("runs/1", 3)
