"""Read a Markdown page: its headings, links, code fences and code spans, each with its line number."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w-]*)")
_HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
_SPAN = re.compile(r"(`+)(.+?)\1")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINITION = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*(\S+)")
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
    """What the checks need of one page. Links and spans are (line, text); anchors are as GitHub makes them."""

    path: Path
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
    counts: dict[str, int] = {}
    fence: tuple[str, str, int, list[str]] | None = None  # mark, language, first line, text
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        mark = _FENCE.match(line)
        if fence is not None:
            if mark and mark[1].startswith(fence[0]) and not mark[2]:
                page.fences.append(Fence(fence[1], "\n".join(fence[3]), fence[2]))
                fence = None
            else:
                fence[3].append(line)
        elif mark:
            fence = (mark[1], mark[2].lower(), number + 1, [])
        else:
            _read_line(page, line, number, counts)
    if fence is not None:
        raise ValueError(f"{path}:{fence[2] - 1}: this code fence is never closed")
    return page


def _read_line(page: Page, line: str, number: int, counts: dict[str, int]) -> None:
    if heading := _HEADING.match(line):
        page.headings.append(heading[2])
        anchor = slug(heading[2])
        seen = counts.get(anchor, 0)
        counts[anchor] = seen + 1
        page.anchors.add(f"{anchor}-{seen}" if seen else anchor)
    page.spans += [(number, span[2].strip()) for span in _SPAN.finditer(line)]
    plain = _SPAN.sub("`code`", line)
    page.anchors |= set(_ANCHOR.findall(plain))
    for pattern in (_LINK, _DEFINITION, _ATTRIBUTE):
        page.links += [(number, target) for target in pattern.findall(plain)]
