"""Numbers, ranges and tables as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 108
"""Columns of a page."""
INDENT = 2


def count(number: int, one: str) -> str:
    """``1 sample``, ``1,024 samples``."""
    if number == 1:
        return f"1 {one}"
    return f"{number:,} {one}{'es' if one.endswith(('ch', 's')) else 's'}"


def span(numbers: Sequence[int]) -> str:
    """``3``, ``0-7`` for consecutive numbers, ``0, 8, .., 56`` for others."""
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, .., {numbers[-1]}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, width: int = WIDTH) -> list[str]:
    """Left-aligned columns, numbers right-aligned; the last column is wrapped."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    numeric = [all(line[i].replace(",", "").isdigit() for line in cells) for i in range(len(head))]
    before = INDENT + sum(widths[:-1]) + 2 * (len(head) - 1)

    def line(row: Sequence[str]) -> list[str]:
        padded = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(row[:-1], widths, numeric, strict=False)
        ]
        last = textwrap.wrap(row[-1], max(20, width - before), break_on_hyphens=False) or [""]
        if numeric[-1]:
            last = [row[-1].rjust(widths[-1])]
        start = (" " * INDENT + "  ".join([*padded, ""])) if padded else " " * INDENT
        return [(start + last[0]).rstrip(), *(" " * before + text for text in last[1:])]

    lines = line(list(head)) if any(head) else []
    return lines + [text for row in cells for text in line(row)]


def labeled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns without a head."""
    return table(("", ""), rows)


def bullets(sentences: Iterable[str]) -> list[str]:
    """A list of sentences."""
    return [line for sentence in sentences for line in wrapped(sentence, "  - ", "    ")]


def wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    """The lines of a paragraph, indented by ``first`` and ``later``; only spaces are broken at."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )
