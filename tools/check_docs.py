"""Check the documentation: ``python -m tools.check_docs``; exit status 1 and one line per mistake when there are any.

With ``--run RUN_DIR`` only compare the metrics that a run has logged with their reference page.

What is checked: relative links and anchors; ``train.py``, ``python -m`` and ``make`` command lines in shell fences;
flags, files and dotted names in code spans; Python fences compile; generated pages, the scripts of models and the types
of arguments match what they are generated from; every page of ``docs`` can be reached from its index; prose has none of
the words in ``tools.check_words.WORDS``, nor has the code in ``tools.check_words.PATHS``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from tools import (
    check_words,
    gen_args,
    gen_arguments_doc,
    gen_config_files_doc,
    gen_examples_doc,
    gen_model_scripts,
    gen_models_doc,
    gen_not_available_doc,
    gen_quick_start_doc,
    gen_rewards_doc,
)
from tools.doc_commands import ROOT, check_fence, check_spans
from tools.markdown import Page, read_page
from tools.metric_names import PAGE as METRICS
from tools.metric_names import names_of_run, undocumented

INDEX = ROOT / "docs" / "en" / "README.md"
TOP = ("README.md", "CONTRIBUTING.md")
GENERATED = {
    module.PAGE: module
    for module in (
        gen_arguments_doc,
        gen_config_files_doc,
        gen_examples_doc,
        gen_models_doc,
        gen_not_available_doc,
        gen_quick_start_doc,
        gen_rewards_doc,
    )
}
"""Page that is generated, as a whole or in part -> the module whose ``render()`` returns it."""
QUOTES = (gen_arguments_doc.PAGE,)
"""Pages that quote the help texts of other programs: their code spans are not checked."""

GENERATED_PROSE = (gen_arguments_doc.PAGE, gen_models_doc.PAGE, gen_config_files_doc.PAGE)
"""Pages whose words come from the code."""


def documents() -> list[Path]:
    """The pages that are checked."""
    found = [ROOT / name for name in TOP]
    for folder in ("docs", "examples", "requirements", "scripts"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return [path for path in found if path.is_file()]


def check_links(page: Page, pages: dict[Path, Page]) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) of links to files that do not exist and to anchors that no heading makes."""
    for line, link in page.links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        if not target.exists():
            yield line, f"broken link {link}: there is no {_shown(target)}"
        elif anchor and target.suffix == ".md":
            other = pages.get(target) or read_page(target)
            if anchor not in other.anchors:
                yield line, f"broken link {link}: {_shown(target)} has no heading with the anchor #{anchor}"


def check_python(page: Page) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) of Python fences that do not compile."""
    for fence in page.fences:
        if fence.language in ("python", "py"):
            try:
                ast.parse(textwrap.dedent(fence.text))
            except SyntaxError as error:
                yield fence.line + (error.lineno or 1) - 1, f"this Python does not compile: {error.msg}"


def check_prose(page: Page) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) of words outside of code and link targets that have a plainer one."""
    for number, line in enumerate(page.prose.splitlines(), start=1):
        for word, instead in check_words.plainer(re.sub(r"\]\([^)]*\)", "]", line)):
            yield number, f"{word!r}: write {instead}"


def unreachable(index: Path, pages: dict[Path, Page]) -> list[Path]:
    """Return the pages below the folder of ``index`` that no chain of links leads to from it."""
    seen, todo = {index}, [index]
    while todo:
        page = todo.pop()
        for _, link in pages[page].links:
            target = (page.parent / unquote(link).partition("#")[0]).resolve()
            if target in pages and target not in seen:
                seen.add(target)
                todo.append(target)
    return sorted(path for path in pages if path.is_relative_to(index.parent) and path not in seen)


def check_pages(paths: Iterable[Path], index: Path | None = None) -> list[str]:
    """Return one line per mistake, ``file:line: what``."""
    pages: dict[Path, Page] = {}
    mistakes: list[str] = []
    for path in paths:
        try:
            pages[path.resolve()] = read_page(path)
        except ValueError as error:
            mistakes.append(str(error))
    for page in pages.values():
        found = [*check_links(page, pages), *check_python(page)]
        if page.path not in QUOTES:
            found += check_spans(page)
        if page.path not in GENERATED_PROSE:
            found += check_prose(page)
        for fence in page.fences:
            found += check_fence(fence)
        mistakes += [f"{_shown(page.path)}:{line}: {mistake}" for line, mistake in sorted(found)]
    if index is not None and index in pages:
        where = _shown(index)
        mistakes += [f"{_shown(path)}:1: no link leads here from {where}" for path in unreachable(index, pages)]
    elif index is not None:
        mistakes.append(f"{_shown(index)}:1: the index of the documentation is missing")
    return mistakes


def check_generated() -> list[str]:
    """Return one line per generated page that is out of date."""
    return [
        f"{_shown(page)}:1: does not match what it is generated from; run `python -m {generator.__name__}`"
        for page, generator in GENERATED.items()
        if not page.is_file() or page.read_text(encoding="utf-8") != generator.render()
    ]


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def main() -> int:
    """Check everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="RUN_DIR", help="compare the metrics of this run with their reference page")
    run_dir = parser.parse_args().run
    if run_dir is not None:
        missing = undocumented(names_of_run(run_dir))
        print("\n".join(f"{_shown(METRICS)} does not describe {name}" for name in missing), end="\n" * bool(missing))
        return 1 if missing else 0
    begin = time.monotonic()
    paths = documents()
    mistakes = [
        *check_pages(paths, INDEX),
        *check_generated(),
        *gen_args.differences(),
        *gen_model_scripts.differences(),
        *(mistake for _, mistake in check_words.check_paths(ROOT / path for path in check_words.PATHS)),
    ]
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    verdict = f"{len(mistakes)} mistakes" if mistakes else "no mistake"
    print(f"docs: {len(paths)} pages, {verdict} ({time.monotonic() - begin:.1f} s)")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
