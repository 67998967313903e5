"""Check the words of the code: ``python -m tools.check_words [PATH ...]``; exit status 1 if there are hits.

Docstrings, comments, messages (strings of ``raise``, of log calls and of warnings) and names of tests have none of the
words in ``WORDS``; no docstring opens with a question word. Code spans (between backticks) may have any word. ``make
docs`` checks ``PATHS``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("slime", "slime_plugins", "tools", "benchmarks", "examples", "scripts", "tests")
"""Files and folders that ``make docs`` checks."""
WORDS = {
    r"nucle(us|i)": "top-p set, top-p token mask",
    r"further tokens": "MTP targets, MTP layers",
    r"asleep|falls? asleep|sleeping trainers?": "offloaded",
    r"wakes? up|woken": "onload",
    r"befall?s?|befell": "happens to",
    r"mend(s|ed)?": "fix",
    r"torn": "split across nodes",
    r"greet(s|ed|ing)?": "health check",
    r"told": "a passive of: pass, name, report",
    r"nobody": "no process, not used",
    r"anew": "again",
    r"go(es)? on|went on": "continue, resume",
    r"come(s)? back|came back": "is returned, is restarted",
    r"lives in": "is in",
    r"for want of": "not available",
    r"at the door of": "attributed to",
    r"whole story": "details",
    r"maths": "math",
    r"learnt": "learned",
    r"for ever": "forever",
    r"\w*(optim|minim|maxim|summar|normal|general|initial|serial|organ|custom|synchron|recogn|token|quant)is"
    r"(e|es|ed|er|ers|ing|ation|ations)": "American spelling, -ize",
    r"\w*(behavi|neighb|fav|col|hon)our\w*": "American spelling, -or",
}
"""Words that prose and code do without (regular expressions) -> what to write instead."""
OPENINGS = ("What", "Whether", "Which", "Where", "How", "Who", "Whatever", "Whichever")

_WORDS = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
_CODE = re.compile(r"(`+)[^`]+\1")
_OPENING = re.compile(rf"({'|'.join(OPENINGS)})\b")
_LOG_CALL = re.compile(r"(.*\.)?((_?log(ger|ging)?|warnings|diagnostics)\.\w+|warn\w*)", re.IGNORECASE)


def plainer(text: str) -> Iterator[tuple[str, str]]:
    """Yield (word, what to write instead) of the words in ``text`` that have a plainer one."""
    for found in _WORDS.finditer(text):
        yield found[0], next(i for word, i in WORDS.items() if re.fullmatch(word, found[0], re.IGNORECASE))


def check_source(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, mistake) of one Python source."""
    tree = ast.parse(source)
    for line, kind, text in [*_texts(tree), *_comments(source)]:
        prose = _CODE.sub(lambda span: "`" + "\n" * span[0].count("\n"), text)
        for number, row in enumerate(prose.split("\n"), start=line):
            for word, instead in plainer(row):
                yield number, kind, f"{word!r}: write {instead}"
        if kind == "docstring" and (opening := _OPENING.match(text.lstrip())):
            yield line, "opening", f"{opening[0]!r}: write a statement (Return ..., True if ...)"


def _texts(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (first line, kind, text) of the docstrings, also those below assignments, test names and messages."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, "docstring", text
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test_"):
                yield node.lineno, "test name", node.name.replace("_", " ")
            case ast.Raise() | ast.Call():
                yield from _message(node)


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    if not any(_WORDS.search(line.partition("#")[2]) for line in source.splitlines()):
        return  # tokenizing takes most of the time
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string


def _message(node: ast.Raise | ast.Call) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Call) and not _LOG_CALL.fullmatch(ast.unparse(node.func)):
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, "message", part.value


def check_paths(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Return (kind, ``file:line: mistake``) of the Python files at and below ``paths``."""
    mistakes = []
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            shown = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
            found = set(check_source(file.read_text(encoding="utf-8")))
            mistakes += [(kind, f"{shown}:{line}: {mistake}") for line, kind, mistake in sorted(found)]
    return mistakes


def main(arguments: list[str] | None = None) -> int:
    """Check the given paths; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="PATH", nargs="*", help=f"files and folders, default: {' '.join(PATHS)}")
    paths = [Path(path).resolve() for path in parser.parse_args(arguments).paths] or [ROOT / path for path in PATHS]
    mistakes = check_paths(paths)
    for _, mistake in mistakes:
        print(mistake)
    counts = Counter(kind for kind, _ in mistakes)
    print(f"words: {', '.join(f'{kind} {count}' for kind, count in sorted(counts.items())) or 'no hit'}")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
