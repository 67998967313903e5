"""No code decides by the text of an exception: messages are for people, and may be edited."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READS_WORDS_OF_OTHERS = {
    "structured_error.data_of": "torch, gloo, NCCL and the operating system on lost connections",
    "cluster._start_twice": "Ray on its own start",
    "save_load._is_of_planning": "torch on checkpoints that do not fit the model",
    "pickles._load_storage": "torch on pickles",
    "pickles.plain_values_only": "torch on pickles",
    "hook.awaited_off_loop": "asyncio on a loop that does not run",
    "http_requests.refusal_of": "SGLang on prompts that are too long",
    "agents.make_agent": "the dynamic linker on a library that is missing",
}
"""Exceptions of other packages say all in words; each place turns them into a type, data or a hint."""
HAS_A_TEXT = re.compile(r"\b(str|repr|format_exception)\(\w+\)|\.(message|body)\b")
SEARCHES = ("startswith", "endswith", "find", "search", "match", "fullmatch", "findall")


def exceptions_of(nodes: list[ast.AST]) -> set[str]:
    """Return the names of exceptions: of handlers, and of parameters that are annotated so."""
    names = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation).removesuffix(" | None")
            if kind.endswith(("Error", "Exception", "Failure", "Retry")):
                names.add(node.arg)
    return names


def has_text(expression: ast.AST, exceptions: set[str], texts: set[str]) -> bool:
    """Return whether an expression contains the text of one of ``exceptions``, or one of the names ``texts``."""
    for part in ast.walk(expression):
        match part:
            case ast.Name(id=name) if name in texts:
                return True
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]) if name in exceptions:
                return True
            case ast.Call(func=ast.Attribute(attr="format_exception"), args=[ast.Name(id=name)]) if name in exceptions:
                return True
            case ast.Attribute(value=ast.Name(id=name), attr="message" | "body") if name in exceptions:
                return True
    return False


def decides_by_text(function: ast.AST) -> bool:
    """Return whether the text of an exception is compared or searched."""
    nodes = list(ast.walk(function))
    exceptions = exceptions_of(nodes)
    if not exceptions:
        return False
    texts, looked_at = set(), []
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called) as value):
                kind = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
                if kind in ("str", "repr", "lower", "strip", "splitlines") and has_text(value, exceptions, set()):
                    texts.add(name)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() | ast.Eq()], comparators=[right]):
                looked_at += [left, right]
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args) if name in SEARCHES:
                looked_at += [value, *args]
    return any(has_text(expression, exceptions, texts) for expression in looked_at)


def functions() -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions and methods that have the text of anything, named by file and function."""
    for folder in ("slime", "slime_plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            lines = source.splitlines()
            pending: list[ast.AST] = [ast.parse(source)] if HAS_A_TEXT.search(source) else []
            while pending:
                node = pending.pop()
                if isinstance(node, ast.Module | ast.ClassDef):
                    pending += node.body
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                    HAS_A_TEXT.search(line) for line in lines[node.lineno - 1 : node.end_lineno]
                ):
                    yield f"{path.stem}.{node.name}", node


@pytest.mark.parametrize(
    ("source", "decides"),
    [
        ("def f():\n try: g()\n except E as e:\n  if MARK in str(e): pass", True),
        ("def f():\n try: g()\n except E as e:\n  text = str(e).lower()\n  if 'refused' in text: pass", True),
        ("def f(e: Exception):\n return re.search(MARK, str(e))", True),
        ("def f(e: BaseException | None):\n return str(e).startswith(MARK)", True),
        ("def f(e: EngineError):\n return 'gone' in e.body", True),
        ("def f(e: EngineError):\n return e.status == 404 or e.data.get('refused')", False),
        ("def f():\n try: g()\n except E as e:\n  log(str(e)); raise F(f'{e}')", False),
    ],
)
def test_what_counts_as_a_decision_by_text(source: str, decides: bool) -> None:
    assert decides_by_text(ast.parse(source)) is decides


def test_only_words_of_other_packages_are_read() -> None:
    assert {name for name, function in functions() if decides_by_text(function)} == set(READS_WORDS_OF_OTHERS)
