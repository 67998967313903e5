"""Product code reads declared flags as ``args.x``: after parsing every one of them exists, with its one default.

``getattr(args, "x", default)`` repeats a default, which may differ from the declared one. ``GUARDED`` counts the reads
that still do, file by file; ``python -m tests.unit.test_argument_reads`` writes it anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.arguments import run_args

ROOT = Path(__file__).parents[2]
GUARDED = ROOT / "tests" / "data" / "guarded_flags.tsv"
PACKAGES = ("slime", "slime_plugins")
ALLOWED = {
    "slime/arguments/files/role_config.py": "parse_megatron_role_args takes the namespace of a plugin",
    "slime/arguments/rules/megatron.py": "set_default_megatron_args takes the namespace of a tool's own parser",
    "slime/arguments/rules/placement.py": "derived by this rule, so not there yet when it runs first",
}


def guarded_reads(source: str, declared: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every ``getattr(args, "<declared>", default)``, of whatever ends in ``args``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), _]):
                if name in declared and ast.unparse(owner).endswith("args"):
                    yield node.lineno, name


def found() -> dict[str, int]:
    """File -> number of guarded reads, of the files that have any and are not in ``ALLOWED``."""
    declared = set(vars(run_args()))
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    counts = {
        path.relative_to(ROOT).as_posix(): len(list(guarded_reads(path.read_text(encoding="utf-8"), declared)))
        for path in paths
    }
    return {path: count for path, count in counts.items() if count and path not in ALLOWED}


def test_declared_flags_are_read_without_a_default() -> None:
    """No file may gain a guarded read; a file that has fewer gets its lower number."""
    lines = [line.split("\t") for line in GUARDED.read_text(encoding="utf-8").splitlines()]
    assert found() == {path: int(count) for path, count in lines}


def test_files_that_may_have_guards_have_some() -> None:
    declared = set(vars(run_args()))
    assert all(list(guarded_reads((ROOT / path).read_text(encoding="utf-8"), declared)) for path in ALLOWED)


def test_what_counts_as_a_guarded_read() -> None:
    source = (
        "getattr(args, 'lr', 0.1)\n"
        "getattr(self.args, 'lr', None)\n"
        "getattr(args, 'lr')\n"
        "getattr(args, name, None)\n"
        "getattr(args, 'of_my_own', 1)\n"
        "getattr(config, 'lr', None)\n"
    )
    assert list(guarded_reads(source, {"lr"})) == [(1, "lr"), (2, "lr")]


if __name__ == "__main__":
    GUARDED.write_text("".join(f"{path}\t{count}\n" for path, count in found().items()), encoding="utf-8")
