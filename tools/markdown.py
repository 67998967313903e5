"""Read a Markdown page: its headings, links, code fences and code spans, each with its line number."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w-]*)")
_HEADING = re.compile(r"^(#{1,6})[ \t]+(.*?)[ \t]*#*$", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]+\]:[ \t]*(\S+)", re.MULTILINE)
_ATTRIBUTE = re.compile(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"")
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Fence:
    """A block of code: its language (lower case, may be empty), its text and the line of its first line of text."""

    language: str
    text: str
    line: int


@dataclass
class Page:
    """The parts of one page that the checks need. Links and spans are (line, text); anchors are as GitHub makes them.

    ``prose`` is the page without its code, with the same number of lines.
    """

    path: Path
    prose: str = ""
    links: list[tuple[int, str]] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    headings: list[str] = field(default_factory=list)


def slug(heading: str) -> str:
    """Return the anchor GitHub gives a heading: lower case, punctuation dropped, a hyphen per space."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def read_page(path: Path) -> Page:
    """Parse ``path``. Raises ValueError for a code fence that is never closed."""
    page = Page(path)
    prose = _take_fences(page, path.read_text(encoding="utf-8").splitlines())
    counts: dict[str, int] = {}
    for heading in _HEADING.finditer(prose):
        page.headings.append(heading[2])
        anchor = slug(heading[2])
        seen = counts.get(anchor, 0)
        counts[anchor] = seen + 1
        page.anchors.add(f"{anchor}-{seen}" if seen else anchor)
    page.spans = [(_line(prose, span), " ".join(span[2].split())) for span in _SPAN.finditer(prose)]
    # What spans hold is code, not links; line breaks inside stay, so that line numbers hold.
    plain = _SPAN.sub(lambda span: "code" + "\n" * span[2].count("\n"), prose)
    page.prose = plain
    page.anchors |= set(_ANCHOR.findall(plain))
    for pattern in (_LINK, _DEFINITION, _ATTRIBUTE):
        page.links += [(_line(plain, link, 1), link[1]) for link in pattern.finditer(plain)]
    return page


def _take_fences(page: Page, lines: list[str]) -> str:
    """Put the code fences of ``lines`` into ``page``; return the text with their lines empty."""
    prose: list[str] = []
    fence: tuple[str, str, int, list[str]] | None = None  # mark, language, first line, text
    for number, line in enumerate(lines, start=1):
        mark = _FENCE.match(line)
        if fence is not None and mark and mark[1].startswith(fence[0]) and not mark[2]:
            page.fences.append(Fence(fence[1], "\n".join(fence[3]), fence[2]))
            fence = None
        elif fence is not None:
            fence[3].append(line)
        elif mark:
            fence = (mark[1], mark[2].lower(), number + 1, [])
        else:
            prose.append(line)
            continue
        prose.append("")
    if fence is not None:
        raise ValueError(f"{page.path}:{fence[2] - 1}: this code fence is never closed")
    return "\n".join(prose)


def _line(text: str, match: re.Match[str], group: int = 0) -> int:
    return text.count("\n", 0, match.start(group)) + 1
