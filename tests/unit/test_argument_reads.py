"""Product code reads declared flags as ``args.x``: after parsing every one of them exists, with its one default.

``getattr(args, "x", default)`` repeats a default, which may differ from the declared one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.arguments import run_args

ROOT = Path(__file__).parents[2]
PACKAGES = ("slime", "slime_plugins")
ALLOWED = {
    "slime/arguments/rules/roles.py": "parse_megatron_role_args takes the namespace of a plugin",
    "slime/arguments/rules/megatron.py": "set_default_megatron_args takes the namespace of a tool's own parser",
    "slime/backends/megatron_utils/arguments.py": "set_default_megatron_args, as above",
    "slime/backends/megatron_utils/checkpoints/convert.py": "args are those that Megatron-LM wrote into a checkpoint",
    "slime/models/shape.py": "a caller of the public FLOPs functions may have no checkpoint",
    "slime/arguments/rules/placement.py": "derived by this rule, so not there yet when it runs first",
    "slime/arguments/rules/debug.py": "as above, where a tool applies the rules",
}


def guarded_reads(source: str, declared: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every ``getattr(args, "<declared>", default)``, of whatever ends in ``args``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), _]):
                if name in declared and ast.unparse(owner).endswith("args"):
                    yield node.lineno, name


def test_declared_flags_are_read_without_a_default() -> None:
    declared = set(vars(run_args()))
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        if path.relative_to(ROOT).as_posix() not in ALLOWED
        for line, name in guarded_reads(path.read_text(encoding="utf-8"), declared)
    ]
    assert found == []


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
