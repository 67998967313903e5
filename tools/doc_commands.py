"""Check what documentation tells people to type: command lines in shell fences, and flags and paths in code spans."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from slime.arguments.availability import unavailable_messages
from slime.arguments.command_line import OF_YOUR_OWN, all_flags, build_parser, nearest, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.older_flags import older_flags
from slime.compat.old_paths import PUBLIC, home_of
from slime.ray.driver.engines_command import parser
from tools.markdown import Fence, Page

ROOT = Path(__file__).resolve().parents[1]
SHELLS = ("bash", "sh", "shell", "console")
OWN = ("slime", "tools", "tests", "examples", "docs", "docker", "requirements", "scripts", "slime_plugins")
PROGRAMS = ("train.py", "train_async.py")
OPEN_ENDED = ("...", "$", "\N{HORIZONTAL ELLIPSIS}")
"""A command line that holds one of these is a form to fill in: flags are checked, values are not."""
SEPARATORS = ("&&", "||", ";", "|", "&")
ELSEWHERE = {"--no-deps": "pip"}
"""Flags of other programs that code spans may name."""


def commands(fence: Fence) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, words) of the commands of a shell fence; continued lines are joined, comments left out."""
    lines = [re.sub(r"^\s*\$ ", "", line) for line in fence.text.split("\n")]
    start, joined = 0, ""
    for number, line in enumerate(lines):
        if not joined:
            start = number
        joined += line.removesuffix("\\")
        if line.endswith("\\") and number + 1 < len(lines):
            joined += " "
            continue
        yield from ((fence.line + start, words) for words in _split(joined))
        joined = ""


def _split(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word in SEPARATORS:
            yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


def check_fence(fence: Fence) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) of the commands of a shell fence."""
    if fence.language not in SHELLS:
        return
    try:
        found = list(commands(fence))
    except ValueError as error:
        yield fence.line, f"a shell would not understand this block: {error}"
        return
    for line, words in found:
        yield from ((line, mistake) for mistake in check_command(words))


def check_command(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with one command: ``train.py``, ``slime``, ``python -m`` and ``make`` are known."""
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words = words[1:]
    if not words:
        return
    program = next((w for w in words if Path(w).name in PROGRAMS), None)
    if program is not None:
        yield from _check_train(words[words.index(program) + 1 :])
    elif words[0] == "slime":
        yield from _check_module("slime", words[1:])
    elif words[0] == "make":
        yield from (f"the Makefile has no target {w}" for w in words[1:] if "=" not in w and w not in make_targets())
    elif "-m" in words and Path(words[0]).name.startswith("python"):
        position = words.index("-m")
        if position + 1 < len(words):
            yield from _check_module(words[position + 1], words[position + 2 :])


def _check_train(words: list[str]) -> Iterator[str]:
    open_ended = any(mark in word for word in words for mark in OPEN_ENDED)
    if "--help" in words or "-h" in words:
        return
    if open_ended:
        yield from (flag_mistake(w) for w in words if w.startswith("--") and flag_mistake(w))
        return
    flags = all_flags()
    try:
        given, _ = read_words(build_parser(flags), words)
    except ArgumentError as error:
        yield from (line for line in str(error).splitlines() if line != OF_YOUR_OWN)
        return
    if not given.get("dry_run"):
        yield from unavailable_messages(given, flags)


def flag_mistake(word: str) -> str:
    """Return what is wrong with a flag of ``train.py`` (``--x``, ``--x=1``, ``--x-*``), or an empty text."""
    name = word.split("=", 1)[0]
    known = options()
    if name.endswith("*"):
        stem = name.rstrip("*")
        return "" if any(option.startswith(stem) for option in known) else f"no flag starts with {stem}"
    if name in known:
        return ""
    guess = nearest(name, sorted(known))
    return f"unknown flag {name}" + (f"; did you mean {guess}?" if guess else "")


LOG_PROB_SERVER = "slime.backends.megatron_utils.server.megatron_server"


def _check_module(module: str, words: list[str]) -> Iterator[str]:
    if module.split(".")[0] not in OWN:
        return
    if module == "slime" and words[:1] == ["engines"]:
        yield from _check_engines(words[1:])
        return
    if module in ("slime", "slime.arguments", LOG_PROB_SERVER):
        yield from _check_train(words[1:] if module == "slime" else words)
        return
    path = ROOT.joinpath(*home_of(module).split("."))
    if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
        yield f"there is no module {module} to run"
        return
    given = {w.split("=", 1)[0] for w in words if w.startswith("--")}
    if given:
        help_text = module_help(module)
        yield from (f"{module} has no flag {w}" for w in sorted(given) if not re.search(rf"{w}(?![\w-])", help_text))


def _check_engines(words: list[str]) -> Iterator[str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser().parse_args(words)
    except SystemExit as end:
        if end.code:
            yield said.getvalue().splitlines()[-1]


@cache
def options() -> frozenset[str]:
    """Every spelling of every flag of ``train.py``."""
    return frozenset({option for flag in all_flags() for option in flag.options} | {"--help", *older_flags()})


@cache
def tool_options() -> frozenset[str]:
    """The flags that commands in ``tools`` declare."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tools").glob("*.py"))
    calls = (call for text in sources for call in re.findall(r"\.add_argument\(([^)]*)", text))
    return frozenset(flag for call in calls for flag in re.findall(r'"(--[a-z][\w-]*)"', call))


@cache
def make_targets() -> frozenset[str]:
    """The targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def module_help(module: str) -> str:
    """Return the output of ``python -m module --help``."""
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def check_spans(page: Page) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) of code spans: flags, files of the repository and dotted names that do not exist."""
    for line, span in page.spans:
        if re.match(r"--[A-Za-z]", span):
            words = [w.rstrip(",;") for w in span.split() if w.startswith("--")]
            yield from (
                (line, mistake)
                for w in words
                if w not in {*ELSEWHERE, *tool_options()} and (mistake := flag_mistake(w))
            )
        elif re.fullmatch(rf"({'|'.join(OWN)})/[\w./-]*", span):
            if not (ROOT / span).exists():
                yield line, f"there is no {span}"
        elif re.fullmatch(r"(slime|tools|examples)(\.\w+)+(\(\))?", span) and (mistake := name_mistake(span)):
            yield line, mistake


def name_mistake(name: str) -> str:
    """Return what is wrong with a dotted name of the repository, found out without importing it, or an empty text."""
    parts = home_of(name.removesuffix("()")).split(".")
    module, attribute = ".".join(parts[:-1]), parts[-1]
    if ".".join(parts) in PUBLIC or attribute in PUBLIC.get(module, {}):
        return ""
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        source = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        if source is None:
            continue
        text = source.read_text(encoding="utf-8")
        missing = [part for part in parts[end:] if not re.search(rf"\b{re.escape(part)}\b", text)]
        return f"{name}: {source.relative_to(ROOT)} has no {'.'.join(missing)}" if missing else ""
    return f"there is no module {name}"
